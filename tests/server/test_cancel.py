"""Ending a request by its id, from any connection."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.clients import GrpcStream, HttpClient, grpc_stream
from tests.support.hashing import ENDLESS, GREEDY, PROMPT, answer


@pytest.fixture
def other(hash_server) -> Iterator[GrpcStream]:
    """A second connection."""
    with grpc_stream(hash_server.grpc_url) as stream:
        yield stream


def begun(stream: GrpcStream, request_id: str) -> None:
    stream.send(PROMPT, stream=True, request_id=request_id, parameters=ENDLESS)
    assert stream.next().text


def test_a_running_request_is_ended_from_another_connection(grpc, other):
    begun(grpc, "mine")
    (response,) = other.ask(None, cancel=True, request_id="mine")
    assert (response.text, response.final, response.id) == ("", True, "mine")
    assert "the request was cancelled" in grpc.rest()[-1].error
    assert grpc.ask(PROMPT, exclude_input_in_output=True, parameters={"max_tokens": 3, **GREEDY})[0].text == answer(3)


def test_every_request_of_the_id_and_no_other(grpc, other):
    for request_id in ("these", "these", "not this"):
        begun(other, request_id)
    grpc.ask(None, cancel=True, request_id="these")
    ended = []
    while len(ended) < 2:
        response = other.next()
        ended += [response] if response.error else []
    assert all("cancelled" in response.error for response in ended)
    going = [other.next() for _ in range(5)]
    assert not any(response.error for response in going) and {response.id for response in going} == {"not this"}


def test_an_order_as_a_parameter_over_http(grpc, http):
    begun(grpc, "over http")
    assert http.generate(None, cancel=True, id="over http")["text_output"] == ""
    assert "cancelled" in grpc.rest()[-1].error


def test_a_stream_over_http_is_ended_by_its_id(grpc, hash_server):
    pieces: list[dict] = []
    begun, http = threading.Event(), HttpClient(hash_server.http_url)

    def read() -> None:
        for piece in http.stream(PROMPT, id="http stream", **ENDLESS):
            pieces.append(piece)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(30)
    grpc.ask(None, cancel=True, request_id="http stream")
    reader.join(30)
    assert not reader.is_alive() and "cancelled" in pieces[-1]["error"]


def test_an_id_that_nobody_has_is_no_error(grpc):
    (response,) = grpc.ask(None, cancel=True, request_id="nobody")
    assert (response.text, response.final, response.error) == ("", True, "")


def test_an_order_without_an_id(grpc, http):
    words = "the request id is missing; allowed with 'cancel' is that of the requests to end"
    assert grpc.error(None, cancel=True) == words
    assert http.error(None, cancel=True) == (400, words)
