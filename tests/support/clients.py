"""Clients of a running server, HTTP and gRPC, none of which waits for ever."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import requests

# Else gRPC's threads make a process that is forked from this one, such as the next server, crash at times.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype

TIMEOUT = 60.0  # seconds; generous, since the machine may be busy


@dataclass(frozen=True)
class Response:
    """One response of a gRPC stream; `error` is empty unless it is an error."""

    outputs: Mapping[str, np.ndarray]
    id: str = ""
    final: bool = False
    error: str = ""

    @property
    def text(self) -> str:
        return self.outputs["text_output"][0].decode()

    @property
    def finish_reason(self) -> str:
        return self.outputs["finish_reason"][0].decode()


class HttpClient:
    """The generate endpoints of one model."""

    def __init__(self, url: str, model: str = "llm") -> None:
        self._base = url
        self._url = f"{url}/v2/models/{model}"
        self._model = model

    def generate(self, text: str | None = None, **body: Any) -> dict[str, Any]:
        """The one response. Raises AssertionError with the server's words for an error."""
        answer = self.post(text, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, text: str | None = None, *, endpoint: str = "generate", **body: Any) -> requests.Response:
        """Whatever the server answers, errors included."""
        if text is not None:
            body = {"text_input": text} | body
        return self.post_bytes(json.dumps(body).encode(), endpoint)

    def post_bytes(self, body: bytes, endpoint: str = "generate") -> requests.Response:
        return requests.post(f"{self._url}/{endpoint}", data=body, timeout=TIMEOUT)

    def error(self, text: str | None = None, **body: Any) -> tuple[int, str]:
        """(status, words) of a request that must fail."""
        answer = self.post(text, **body)
        assert answer.status_code != 200, answer.text
        return answer.status_code, answer.json()["error"]

    def stream(self, text: str | None, **body: Any) -> Iterator[dict[str, Any]]:
        """The events of generate_stream, as they come. Closing the iterator closes the connection."""
        with self.open_stream(text, **body) as answer:
            yield from events(answer)

    def open_stream(self, text: str | None, **body: Any) -> requests.Response:
        body = ({} if text is None else {"text_input": text}) | {"stream": True} | body
        answer = requests.post(f"{self._url}/generate_stream", json=body, stream=True, timeout=TIMEOUT)
        assert answer.status_code == 200, answer.text
        return answer

    def config(self) -> dict[str, Any]:
        """The model's configuration as the server has it."""
        return requests.get(f"{self._url}/config", timeout=TIMEOUT).json()

    def is_ready(self) -> bool:
        return requests.get(f"{self._url}/ready", timeout=TIMEOUT).status_code == 200

    def load(self, config: Mapping[str, Any] | None = None) -> requests.Response:
        body = {"parameters": {"config": json.dumps(config)}} if config is not None else {}
        return requests.post(f"{self._base}/v2/repository/models/{self._model}/load", json=body, timeout=TIMEOUT)

    def unload(self) -> requests.Response:
        """Returns when the server has taken the order; the model may go on to answer what it has."""
        return requests.post(f"{self._base}/v2/repository/models/{self._model}/unload", json={}, timeout=TIMEOUT)

    def wait_unloaded(self) -> None:
        deadline = time.monotonic() + TIMEOUT
        while self.index()["state"] != "UNAVAILABLE":
            assert time.monotonic() < deadline, "still not unloaded"
            time.sleep(0.05)

    def index(self) -> dict[str, Any]:
        """The model's line in the repository index."""
        models = requests.post(f"{self._base}/v2/repository/index", json={}, timeout=TIMEOUT).json()
        return next(entry for entry in models if entry["name"] == self._model)


def events(answer: requests.Response) -> Iterator[dict[str, Any]]:
    """The events of a response body of type text/event-stream."""
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    for line in answer.iter_lines(chunk_size=1):
        if line:
            assert line.startswith(b"data: ")
            yield json.loads(line[len(b"data: ") :])


class GrpcStream:
    """One ModelStreamInfer call: requests go in, responses come out in the order of arrival."""

    def __init__(self, url: str, model: str = "llm") -> None:
        self._model = model
        self._responses: queue.Queue[Response] = queue.Queue()
        self._client = grpcclient.InferenceServerClient(url)
        self._num_sent, self._num_answered = 0, 0
        self._client.start_stream(self._receive)

    def send(
        self,
        text: str | bytes | None,
        *,
        request_id: str = "",
        timeout_us: int | None = None,
        empty_final: bool = False,
        parameters: dict[str, Any] | None = None,
        outputs: list[str] | None = None,
        **tensors: Any,
    ) -> None:
        """Send a request. `tensors` are inputs by name; a scalar becomes a tensor of shape [1]."""
        values = tensors if text is None else {"text_input": text} | tensors
        self._num_sent += 1
        self._client.async_stream_infer(
            self._model,
            [make_input(name, value) for name, value in values.items()],
            outputs=[grpcclient.InferRequestedOutput(name) for name in outputs] if outputs else None,
            request_id=request_id,
            timeout=timeout_us,
            enable_empty_final_response=empty_final,
            parameters=parameters,
        )

    def next(self, timeout: float = TIMEOUT) -> Response:
        """The next response. Raises queue.Empty when none comes."""
        return self._responses.get(timeout=timeout)

    def rest(self) -> list[Response]:
        """The responses up to and with the next final one or error."""
        responses = [self.next()]
        while not (responses[-1].final or responses[-1].error):
            responses.append(self.next())
        return responses

    def arrived(self) -> list[Response]:
        """The responses that are there already."""
        return [self.next() for _ in range(self._responses.qsize())]

    def ask(self, text: str | bytes | None, **request: Any) -> list[Response]:
        self.send(text, **request)
        return self.rest()

    def error(self, text: str | bytes | None, **request: Any) -> str:
        """The words of a request that must fail."""
        (response,) = self.ask(text, **request)
        assert response.error, response
        return response.error

    def is_quiet(self, seconds: float = 0.3) -> bool:
        """Whether nothing comes for a while."""
        with contextlib.suppress(queue.Empty):
            self._responses.get(timeout=seconds)
            return False
        return True

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        """Cancel what still runs: waiting for it could take for ever.

        Where all has been answered the stream is ended as a polite client does it. A cancellation in the moment of the
        last response leaves the model UNLOADING for ever in some releases of Triton.
        """
        self._client.stop_stream(cancel_requests=self._num_answered < self._num_sent)
        self._client.close()

    def _receive(self, result: Any, error: Any) -> None:
        """For tritonclient's thread."""
        response = Response({}, error=str(error)) if error is not None else read_result(result)
        self._num_answered += bool(response.final or response.error)
        self._responses.put(response)


@contextlib.contextmanager
def grpc_stream(url: str, model: str = "llm") -> Iterator[GrpcStream]:
    stream = GrpcStream(url, model)
    try:
        yield stream
    finally:
        stream.close()


def read_result(result: grpcclient.InferResult) -> Response:
    message = result.get_response()
    outputs = {output.name: result.as_numpy(output.name) for output in message.outputs}
    return Response(outputs, message.id, message.parameters["triton_final_response"].bool_param)


def make_input(name: str, value: Any) -> grpcclient.InferInput:
    """An input from a numpy array, or from a scalar as a tensor of shape [1]."""
    array = value if isinstance(value, np.ndarray) else _array(value)
    tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _array(value: Any) -> np.ndarray:
    if isinstance(value, str | bytes):
        return np.array([value.encode() if isinstance(value, str) else value], dtype=object)
    return np.array([value])
