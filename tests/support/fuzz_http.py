"""Hostile HTTP requests, and a client that sends them byte by byte and waits for each one's only ending."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.support.fuzz import BOUND, Draw, Outcome, Pairs, to_json


@dataclass(frozen=True)
class HttpCase:
    """Bytes for a connection, with a pause before each piece but the first.

    `leaves`: when the client goes: "" after the answer, "sent" after all was sent, "answered" after its first byte.
    `is_proper`: HTTP that a server must answer.
    """

    method: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0
    leaves: str = ""
    is_proper: bool = True

    def send(self, url: str) -> Outcome:
        target = urlsplit(url)
        with socket.create_connection((target.hostname, target.port), timeout=BOUND) as connection:
            with contextlib.suppress(ConnectionError):  # the server may answer before it has read all
                self._send_pieces(connection)
            if self.leaves:
                return self._leave(connection)
            try:
                return _answer(connection, self.method)
            except (ConnectionError, http.client.HTTPException) as error:
                assert not self.is_proper, error
                return Outcome("closed")

    def _send_pieces(self, connection: socket.socket) -> None:
        for index, piece in enumerate(self.pieces):
            time.sleep(self.pause if index else 0)
            connection.sendall(piece)

    def _leave(self, connection: socket.socket) -> Outcome:
        with contextlib.suppress(ConnectionError):
            if self.leaves == "answered":
                connection.recv(1)
        return Outcome("left")


def _answer(connection: socket.socket, method: str) -> Outcome:
    """The one answer; a stream's must be complete, and its error its last event."""
    response = http.client.HTTPResponse(connection, method=method)
    response.begin()
    body = response.read()
    if response.getheader("Content-Type", "").startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: ")]
        assert events, body
        assert not any("error" in event for event in events[:-1]), body
        return _outcome(events[-1])
    if response.status == 200:
        return _outcome(json.loads(body))
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return Outcome("error", json.loads(body)["error"])
    return Outcome("error", f"HTTP {response.status} {body.decode(errors='replace')}")


def _outcome(event: dict[str, Any]) -> Outcome:
    if "error" in event:
        return Outcome("error", event["error"])
    assert "text_output" in event, event
    return Outcome("answer")


def http_case(draw: Draw) -> HttpCase:
    body = _body(draw)
    path = f"/v2/models/llm/{'generate_stream' if draw.likely(0.6) else 'generate'}"
    if draw.likely(0.15):
        return _odd_case(draw, path, body)
    request = _head(path, f"Content-Length: {len(body)}") + body
    if draw.likely(0.1):
        return HttpCase("POST", (request[: draw.randrange(len(request))],), leaves="sent", is_proper=False)
    pieces = _cut(draw, request) if draw.likely(0.15) else (request,)
    return HttpCase("POST", pieces, pause=0.003, leaves=draw.choice(("sent", "answered")) if draw.likely(0.2) else "")


def _head(path: str, *headers: str, method: str = "POST") -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "Host: fuzz", "Connection: close", *headers)
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def _cut(draw: Draw, request: bytes) -> tuple[bytes, ...]:
    """In pieces, the first line in one: where that comes in two, tritonserver at times hangs up without an answer."""
    line = request.index(b"\r\n") + 2
    places = sorted(draw.randrange(line, len(request)) for _ in range(draw.randrange(1, 6)))
    return tuple(request[begin:end] for begin, end in zip([0, *places], [*places, len(request)], strict=True))


def _odd_case(draw: Draw, path: str, body: bytes) -> HttpCase:
    """What only looks like HTTP, or like the request that it is. A server may answer it or hang up."""
    length = f"Content-Length: {len(body)}"
    method = draw.choice(("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO", "post"))
    odd = (
        _head(path, length, method=method) + body,
        _head(path, f"Content-Length: {draw.randrange(len(body) + 1)}") + body,
        _head(path, "Content-Length: -1") + body,
        _head(path, f"Content-Length: {'9' * draw.choice((18, 30))}") + body,
        _head(path, "Content-Length: 5", length) + body,
        _head(path, "Content-Length: five") + body,
        _head(path) + body,
        _head(path, length, "Content-Encoding: gzip") + body,
        _head(path, f"Content-Length: {len(gzip.compress(body))}", "Content-Encoding: gzip") + gzip.compress(body),
        _head(path, length, f"Inference-Header-Content-Length: {draw.choice((-1, 0, 5, 1 << 40))}") + body,
        _head(path, length, f"X-Long: {'x' * 70_000}") + body,
        _head(path, length, *(f"X-{index}: y" for index in range(500))) + body,
        _head(path, length, "Content-Type: text/plain; charset=utf-16", "Accept: nothing") + body,
        _head(path, length, "Expect: 100-continue") + body,
        _head(path, length, "endpoint-load-metrics-format: json", "X-Odd: \xff\x00") + body,
        _head(f"/v2/models/{'llm/versions/7' if draw.likely(0.5) else 'none'}/generate", length) + body,
        _head(f"/v2/models/llm/generate?{'x' * 5000}", length) + body,
        b"\x16\x03\x01\x02\x00\x01\x00" + body,
        path.encode() + b"\r\n\r\n",
    )
    request = draw.choice(odd)
    # A body that is shorter than the head says: only the client's going ends it.
    leaves = "sent" if b"99999\r\n" in request or draw.likely(0.2) else ""
    return HttpCase("HEAD" if request.startswith(b"HEAD") else "POST", (request,), leaves=leaves, is_proper=False)


# Two prompts are an error, and so is an order to end a request that has no id: not too often.
_ADDED = ("stream", "text_input", "input_ids", "prompt_token_ids", "messages", "cancel")


def _fields(draw: Draw) -> Pairs:
    """Fields as the generate endpoints take them: Triton refuses what is no text, number or truth itself."""
    fields = draw.fields() if draw.likely(0.5) else Pairs()
    if draw.likely(0.2):
        return fields
    return Pairs(
        (name, value) for name, value in fields if type(value) in (int, bool, str) and not name.startswith("return")
    )


def _prompt(draw: Draw) -> tuple[str, object]:
    if draw.likely(0.8):
        return "text_input", draw.prompt() if draw.likely(0.9) else draw.any_value()
    return draw.choice((("messages", draw.messages()), ("input_ids", [draw.randrange(-1, 1030) for _ in range(3)])))


def _body(draw: Draw) -> bytes:
    members = Pairs(member for member in _fields(draw) if member[0] not in _ADDED)
    if draw.likely(0.97):
        members.append(_prompt(draw))
    if draw.likely(0.5):
        members.append(("stream", draw.likely(0.5) if draw.likely(0.97) else draw.any_value()))
    if draw.likely(0.4):
        members.append(("sampling_parameters", draw.sampling_text() if draw.likely(0.9) else draw.any_value()))
    if draw.likely(0.15):
        members.append(("parameters", draw.fields() if draw.likely(0.7) else draw.any_value()))
    if draw.likely(0.1):
        members.append(draw.choice((("timeout", draw.any_value()), ("id", draw.any_value()), ("priority", -1))))
    draw.shuffle(members)
    text = to_json(members)
    if draw.likely(0.08):
        cut = draw.randrange(len(text))
        text = draw.choice((text[:cut], text + text, text[:cut] + "\x00" + text[cut:], to_json(draw.any_value())))
    return draw.encoded(text)
