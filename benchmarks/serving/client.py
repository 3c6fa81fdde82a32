"""One streaming request over gRPC, and when its tokens came."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as grpcaio

from benchmarks.serving.progress import Progress
from benchmarks.serving.workload import LoadRequest


@dataclass
class Trace:
    """One request as its client saw it. Times are seconds of `time.perf_counter`.

    `planned` is when the arrival process wanted it sent, `started` when it was.
    """

    planned: float
    started: float
    times: list[float] = field(default_factory=list)  # of each response that brought tokens
    tokens: list[int] = field(default_factory=list)  # in each of them
    input_tokens: int = 0
    error: str = "the stream ended without a final response"

    @property
    def ttft(self) -> float:
        return self.times[0] - self.started

    @property
    def end_to_end(self) -> float:
        return self.times[-1] - self.started

    @property
    def inter_token(self) -> list[float]:
        """Seconds between tokens; tokens that came in one response share the gap before it."""
        gaps = zip(self.times, self.times[1:], self.tokens[1:], strict=False)
        return [(after - before) / count for before, after, count in gaps for _ in range(count)]


class LoadClient:
    """Sends requests of one model over one connection, each as a stream of its own."""

    def __init__(self, client: grpcaio.InferenceServerClient, model: str, timeout: float) -> None:
        self._client, self._model, self._timeout = client, model, timeout

    async def ask(self, request: LoadRequest, planned: float, progress: Progress) -> Trace:
        """Send it and read the answer. The clock starts when all but the sending is done."""
        message = {"model_name": self._model, "inputs": _inputs(request)}
        trace = Trace(planned, time.perf_counter())
        try:
            await self._read(_only(message), trace, progress)
        except grpc.aio.AioRpcError as error:
            trace.error = f"{error.code().name}: {error.details()}"
        progress.answered()
        return trace

    async def _read(self, message: AsyncIterator[dict[str, Any]], trace: Trace, progress: Progress) -> None:
        async for result, error in self._client.stream_infer(message, stream_timeout=self._timeout):
            now = time.perf_counter()
            if error:
                trace.error = error.message()
                return
            if (tokens := int(result.as_numpy("num_output_tokens")[0])) > 0:
                trace.times.append(now)
                trace.tokens.append(tokens)
                progress.received(tokens)
            if result.get_response().parameters["triton_final_response"].bool_param:
                trace.input_tokens = int(result.as_numpy("num_input_tokens")[0])
                trace.error = "" if trace.times else "the answer holds no tokens"


def _inputs(request: LoadRequest) -> list[grpcaio.InferInput]:
    texts = {"text_input": request.text, "sampling_parameters": json.dumps(request.sampling)}
    flags = ("stream", "return_num_input_tokens", "return_num_output_tokens")
    return [_input(name, "BYTES", np.array([text.encode()], dtype=np.object_)) for name, text in texts.items()] + [
        _input(name, "BOOL", np.array([True])) for name in flags
    ]


def _input(name: str, datatype: str, value: np.ndarray) -> grpcaio.InferInput:
    tensor = grpcaio.InferInput(name, [1], datatype)
    tensor.set_data_from_numpy(value)
    return tensor


async def _only(message: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield message
