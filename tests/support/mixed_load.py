"""Clients of every kind under way at once, each in a thread, with requests that only an end of the server ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import requests

from tests.support.clients import HttpClient, events, grpc_stream
from tests.support.hashing import ENDLESS, PROMPT, answer
from tests.support.metrics import wait_metrics

# Six sequences run and six wait; the test-only model's memory is 8 bytes a token.
SETTINGS = {"max_running": 6, "queue_size": 16, "kv_tokens": 6 * (ENDLESS["max_tokens"] + 16)}
# Triton never unloads a model once a client has cancelled in the very moment of its last response.
_BEFORE_CANCEL = 0.3  # seconds
CLOSED = "closed"  # the connection, without an error in words


@dataclass
class Client:
    """One client: `name` is its kind, `ending` the error it was told or `CLOSED`, None while it waits."""

    name: str
    run: Callable[[Client], str]
    text: str = ""
    ending: str | None = None
    ended: float = 0.0
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.ending = self.run(self)
        except requests.exceptions.ReadTimeout:
            self.ending = None  # nobody told it anything
        except requests.exceptions.RequestException:
            self.ending = CLOSED
        self.ended = time.monotonic()


class MixedLoad:
    """HTTP and gRPC, streaming or not, one sequence or two; half of them run and the others wait in the queue."""

    def __init__(self, http_url: str, grpc_url: str, metrics_url: str) -> None:
        http = HttpClient(http_url)
        kinds = {
            "HTTP stream": lambda client: _http_stream(http, client),
            "HTTP generate": lambda client: _http_generate(http),
            "gRPC stream": lambda client: _grpc(grpc_url, client, stream=True),
            "gRPC without streaming": lambda client: _grpc(grpc_url, client, stream=False),
            "gRPC stream of two": lambda client: _grpc(grpc_url, client, stream=True, n=2),
        }
        self.clients = [Client(name, run) for name, run in kinds.items()]
        _wait_load(metrics_url, running=6, waiting=0)
        self.clients += [Client(f"{name}, queued", run) for name, run in kinds.items()]
        _wait_load(metrics_url, running=6, waiting=6)

    def wait_ended(self, seconds: float) -> None:
        """All clients have been told of an end by then, and nothing wrong before it."""
        deadline = time.monotonic() + seconds
        for client in self.clients:
            client.thread.join(max(0.0, deadline - time.monotonic()))
        print(*((client.name, client.ending) for client in self.clients), sep="\n")
        assert not [client.name for client in self.clients if client.ending is None], f"no end within {seconds} s"
        for client in self.clients:
            assert answer(len(client.text) + len(client.text) // 50 + 100).startswith(client.text), client.name


def _wait_load(metrics_url: str, *, running: int, waiting: int) -> None:
    wait_metrics(
        metrics_url,
        lambda scrape: (
            scrape.get("tandem_requests_running") == running and scrape.get("tandem_requests_waiting") == waiting
        ),
    )


def _http_stream(http: HttpClient, client: Client) -> str:
    try:
        response = http.open_stream(PROMPT, **ENDLESS)
    except AssertionError as error:  # a refusal before the first token has a status of its own
        return str(error)
    with response:
        for event in events(response):
            if "error" in event:
                return event["error"]
            client.text += event["text_output"]
    return CLOSED


def _http_generate(http: HttpClient) -> str:
    return http.error(PROMPT, **ENDLESS)[1]


def _grpc(url: str, client: Client, *, stream: bool, n: int = 1) -> str:
    """Of two sequences, the text of the first is kept."""
    with grpc_stream(url) as call:
        call.send(PROMPT, stream=stream, parameters=ENDLESS | {"n": n})
        while not (response := call.next()).error:
            assert not response.final
            client.text += response.text
        time.sleep(_BEFORE_CANCEL)
        return response.error
