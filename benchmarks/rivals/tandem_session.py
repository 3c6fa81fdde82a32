"""Tandem through the whole of Triton: a real tritonserver, asked over gRPC and read as streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil
import tritonclient.grpc.aio as grpcaio

from benchmarks.rivals.memory import Memory, memory_of
from benchmarks.rivals.sessions import Deadline, EngineError
from benchmarks.rivals.waves import Answer, Prompt
from benchmarks.serving.client import LoadClient, Trace
from benchmarks.serving.progress import Progress
from benchmarks.serving.workload import DEFAULT_SAMPLING, LoadRequest
from tests.support.server import RunningServer, running_server


class TandemSession:
    def __init__(self, server: RunningServer, deadline: Deadline) -> None:
        self._server, self._deadline = server, deadline
        self.versions: Mapping[str, str] = {}
        self.command = psutil.Process(server.pid).cmdline()

    def wave(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
        return asyncio.run(self._wave(prompts, tokens))

    def memory(self) -> Memory:
        return memory_of(self._server.pid)

    async def _wave(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
        sampling = {**DEFAULT_SAMPLING, "max_tokens": tokens}
        progress = Progress("", len(prompts), None)
        async with grpcaio.InferenceServerClient(self._server.grpc_url) as connection:
            client = LoadClient(connection, self._server.name, self._deadline.left())
            started = time.perf_counter()
            asked = (client.ask(LoadRequest(prompt.text, sampling), started, progress) for prompt in prompts)
            traces = await asyncio.gather(*asked)
        progress.close()
        return [_answer(trace, started) for trace in traces]


def _answer(trace: Trace, started: float) -> Answer:
    if trace.error:
        raise EngineError(trace.error)
    return Answer([time - started for time in trace.times], trace.tokens)


@contextlib.contextmanager
def tandem(model: str, settings: Mapping[str, str], deadline: Deadline) -> Iterator[TandemSession]:
    try:
        # Without a limit of its own tritonserver waits half a minute for connections that are still open.
        with running_server(
            model=model, settings=settings, extra_flags=["--exit-timeout-secs=3"], timeout=deadline.left()
        ) as server:
            yield TandemSession(server, deadline)
    except AssertionError as error:  # how running_server says that a server did not start, with its log
        raise EngineError(str(error).strip().splitlines()[0][:300]) from None
