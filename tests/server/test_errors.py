"""Bad input and overload: an error for that request alone, in words that name the field."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import numpy as np
import pytest
import requests
import tritonclient.grpc as grpcclient

from tests.support.checkpoints import make_hash_checkpoint
from tests.support.clients import TIMEOUT, HttpClient, grpc_stream
from tests.support.hashing import ENDLESS, GREEDY, PROMPT, answer
from tests.support.server import RunningServer, running_server


@pytest.fixture(scope="module", autouse=True)
def good_stream(hash_server: RunningServer) -> Iterator[None]:
    """A stream that runs beside all tests of this file; at the end all the text it has had is looked at."""
    stub = hash_server.stub_pid
    with grpc_stream(hash_server.grpc_url) as stream:
        stream.send(PROMPT, stream=True, parameters=ENDLESS | {"stream_interval": 50})
        had = [stream.next()]
        yield
        had += stream.arrived()
        for _ in range(20):  # it goes on, unless these tests have taken longer than all its tokens
            had += [] if had[-1].final else [stream.next()]
        text = "".join(response.text for response in had)
        expected = answer(ENDLESS["max_tokens"])
        assert expected == text if had[-1].final else expected.startswith(text)
    assert hash_server.stub_pid == stub


# What the router refuses: (body, words that the error has)
REFUSED = {
    "an empty prompt": ({"text_input": ""}, "'text_input' is ''; allowed is one string that is not empty"),
    "a prompt without tokens": ({"text_input": "?"}, "'text_input' has no tokens"),
    "zero tokens": ({"max_tokens": 0}, "'max_tokens' is 0; allowed is a whole number from 1 to 2147483647"),
    "a negative number": ({"top_k": -2}, "'top_k' is -2"),
    "a fraction": ({"max_tokens": 1.5}, "'max_tokens' is 1.5"),
    "no number": ({"max_tokens": "many"}, "'max_tokens' is 'many'"),
    "a truth for a number": ({"max_tokens": True}, "'max_tokens' is True"),
    "a number for a truth": ({"ignore_eos": 2}, "'ignore_eos' is 2; allowed is true or false"),
    "more than 64 bits": ({"max_tokens": 10**30}, "'max_tokens' is "),
    "a digit string without end": ({"max_tokens": "9" * 100_000}, "'max_tokens' is '9999"),
    "a seed of 65 bits": ({"seed": str(1 << 64)}, "from -9223372036854775808 to 18446744073709551615"),
    "infinity": ({"temperature": "inf"}, "'temperature' is 'inf'"),
    "not a number": ({"temperature": "nan"}, "'temperature' is 'nan'"),
    "top_p of 0": ({"top_p": 0}, "'top_p' is 0; allowed is a number above 0 up to 1"),
    "a token id beyond the vocabulary": ({"stop_token_ids": 1024}, "each from 0 to 1023"),
    "half a list of stop strings": ({"stop": '["a"'}, "it begins like a JSON list of strings, and is none"),
    "too many stop strings": ({"stop": json.dumps(["a"] * 65)}, "at most 64 strings"),
    "min above max": ({"min_tokens": 5, "max_tokens": 4}, "'min_tokens' is 5; allowed is at most max_tokens"),
    "an unknown key": ({"max_token": 4}, "unknown field 'max_token' (did you mean 'max_tokens'?)"),
    "an unknown key in JSON": ({"sampling_parameters": '{"foo": 1}'}, "unknown field 'foo'"),
    "broken JSON": ({"sampling_parameters": "{"}, "'sampling_parameters' is '{'; allowed is a JSON object"),
    "JSON that is no object": ({"sampling_parameters": "[1]"}, "allowed is a JSON object"),
    "JSON nested too deep": ({"sampling_parameters": "[" * 100_000}, "'sampling_parameters' is '[[["),
    "JSON too long": ({"sampling_parameters": f'{{"stop": "{"a" * (1 << 20)}"}}'}, "(more than 1048576 characters)"),
    "a number too long in JSON": ({"sampling_parameters": f'{{"seed": {"9" * 5000}}}'}, "'sampling_parameters' is"),
    "a wrong type in JSON": ({"sampling_parameters": '{"max_tokens": {}}'}, "'max_tokens' is {}"),
    "what is not built": ({"use_beam_search": True}, "'use_beam_search' is True; only false is supported"),
    "two forms of output": ({"guided_regex": "a", "guided_json_object": True}, "'guided_regex' and"),
}


@pytest.mark.parametrize(("body", "words"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_the_field(http, body, words):
    status, error = http.error(None, **{"text_input": PROMPT, **body})
    assert status == 400
    assert words in error
    assert len(error) < 1000


@pytest.mark.parametrize(("body", "words"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_over_grpc(grpc, body, words):
    in_json = body.get("sampling_parameters") or json.dumps({key: body[key] for key in body.keys() - {"text_input"}})
    assert words in grpc.error(body.get("text_input", PROMPT), sampling_parameters=in_json)


def test_a_prompt_longer_than_the_context(http):
    status, error = http.error("丅" * 65_536)
    assert status == 400
    assert error == "'text_input' has 65536 tokens; allowed are at most 65535, so that one more fits in 65536"


def test_a_timeout_that_is_none(http):
    assert "'timeout' is 'soon'; allowed is a whole number" in http.error(PROMPT, timeout="soon")[1]


def test_errors_on_generate_stream(http):
    answered = http.post(PROMPT, endpoint="generate_stream", stream=True, max_tokens=0)
    assert answered.status_code == 400
    assert "'max_tokens' is 0" in answered.text


# What Triton itself refuses before the router sees it


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"text_input": ["a", "b"]}, 400, "'text_input'"),
        ({"text_input": []}, 400, "'text_input'"),
        ({"text_input": PROMPT, "stop_token_ids": [5]}, 400, "'stop_token_ids' has invalid type"),
        ({"text_input": PROMPT, "stop": [5]}, 500, "non-string"),
        ({"text_input": PROMPT, "stream": [True, False]}, 400, "'stream'"),
        ({"text_input": PROMPT, "max_tokens": None}, 400, "'max_tokens' has invalid type"),
        ({"text_input": 5}, 500, "non-string"),
        ({"text_input": PROMPT, "stream": "true"}, 500, "non-boolean"),
    ],
)
def test_shapes_and_types_over_http(http, body, status, words):
    answered = http.post(None, **body)
    assert answered.status_code == status
    assert words in answered.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"text_input":"\\ud800"}', b'{"text_input":"a"'])
def test_bodies_that_are_no_json_object(http, body):
    answered = http.post_bytes(body)
    assert answered.status_code in (400, 500)
    assert answered.json()["error"]


def test_bytes_that_are_not_utf8(http, grpc):
    words = "'text_input' is not valid UTF-8 (byte 3); allowed is UTF-8 text"
    assert grpc.error(b"caf\xe9") == words
    answered = http.post_bytes(b'{"text_input": "caf\xe9"}')
    assert (answered.status_code, answered.json()["error"]) == (400, words)
    assert "'sampling_parameters' is not valid UTF-8" in grpc.error(PROMPT, sampling_parameters=b"\xff")
    assert "'stop' is" in grpc.error(PROMPT, sampling_parameters='{"stop": "\\ud800"}')


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"text_input": np.array([b"a", b"b"], dtype=object)}, "unexpected shape for input 'text_input'"),
        ({"text_input": np.array([[b"a"]], dtype=object)}, "Expected [1], got [1,1]"),
        ({"text_input": np.array([], dtype=object)}, "'text_input'"),
        ({"text_input": 5}, "'text_input' data-type is 'INT64'"),
        ({"text_input": PROMPT, "stream": 1}, "'stream' data-type is 'INT64'"),
        ({"text_input": PROMPT, "max_tokens": 5}, "unexpected inference input 'max_tokens'"),
    ],
)
def test_shapes_and_types_over_grpc(grpc, tensors, words):
    assert words in grpc.error(None, **tensors)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"image": "aGk="}, "'image' is 'aGk='; only an empty list is supported"),
        ({"image": np.array([b"a", b"b"], dtype=object)}, "'image' is ['a', 'b']; only an empty list is supported"),
    ],
)
def test_what_vllm_backend_has_and_we_do_not_is_refused_in_words(grpc, tensors, words):
    assert grpc.error(PROMPT, **tensors) == words


def test_what_vllm_backend_has_and_we_do_not_may_be_left_off(grpc):
    off = {"return_logprobs": False, "return_cumulative_logprob": False}
    (response,) = grpc.ask(PROMPT, **off, exclude_input_in_output=True, parameters={"max_tokens": 3, **GREEDY})
    assert response.text == answer(3)


def test_plain_inference_is_refused_by_triton(hash_server, http):
    body = {"inputs": [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [PROMPT]}]}
    url = f"{hash_server.http_url}/v2/models/llm/infer"
    assert "decoupled" in requests.post(url, json=body, timeout=TIMEOUT).json()["error"]
    with grpcclient.InferenceServerClient(hash_server.grpc_url) as client, pytest.raises(Exception, match="decoupled"):
        client.infer("llm", [], client_timeout=TIMEOUT)


# More load than fits


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Iterator[RunningServer]:
    """One request at a time, one waiting, and a context of 65,536 tokens."""
    checkpoint = make_hash_checkpoint(tmp_path_factory.mktemp("narrow"), max_position=1 << 16)
    with running_server(model=checkpoint, settings={"max_running": 1, "queue_size": 1}) as running:
        yield running


def test_what_does_not_fit_is_refused_at_once_and_what_was_admitted_goes_on(narrow):
    http = HttpClient(narrow.http_url)
    with grpc_stream(narrow.grpc_url) as running, grpc_stream(narrow.grpc_url) as waiting:
        running.send(PROMPT, stream=True, parameters=ENDLESS)
        first = running.next().text
        waiting.send(PROMPT, stream=True, parameters={"max_tokens": 5, **GREEDY})
        assert waiting.is_quiet()
        asked = time.monotonic()
        status, error = http.error(PROMPT)
        assert time.monotonic() - asked < 5
        assert error.startswith("the queue is full: ")
        assert error.endswith("; queue_size is 1 and max_running 1")
        assert status in (400, 503), "older releases of Triton know one status for all errors of a model"
        with grpc_stream(narrow.grpc_url) as refused:
            assert "the queue is full" in refused.error(PROMPT)
        text = first + "".join(running.next().text for _ in range(20))
        assert text.startswith(answer(21))
        running.cancel()
        assert "".join(response.text for response in waiting.rest()) == answer(5)


def test_refusals_leave_room(narrow):
    """A refused or bad request gives its place back at once."""
    http = HttpClient(narrow.http_url)
    for _ in range(20):
        assert http.error(PROMPT, max_tokens=0)[0] == 400
        assert http.error("")[0] == 400
    assert _served(http) == PROMPT + answer(3)


def _served(http: HttpClient) -> str:
    """The answer, once there is room: a cancelled stream may hold its place for a moment."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(AssertionError):
            return http.generate(PROMPT, max_tokens=3, **GREEDY)["text_output"]
        time.sleep(0.05)
    raise AssertionError("never served")
