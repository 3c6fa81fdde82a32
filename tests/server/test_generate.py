"""The generate endpoints: what a curl user sends and sees."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clients import HttpClient
from tests.support.hashing import GREEDY, PROMPT, answer

USAGE = {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
PARIS = "The capital of France is"


@pytest.fixture
def smollm2(server) -> HttpClient:
    return HttpClient(server.http_url)


# The test-only model


@pytest.mark.parametrize("stream", [{}, {"stream": False}])
def test_generate_is_exactly_one_response_that_begins_with_the_prompt(http, stream):
    answered = http.generate(PROMPT, max_tokens=5, **GREEDY, **stream)
    assert answered == {"model_name": "llm", "model_version": "1", "text_output": PROMPT + answer(5)}


def test_usage_and_finish_reason_of_generate(http):
    answered = http.generate(PROMPT, max_tokens=5, exclude_input_in_output=True, **GREEDY, **USAGE)
    assert answered["text_output"] == answer(5)
    assert (answered["num_input_tokens"], answered["num_output_tokens"]) == (3, 5)
    assert answered["finish_reason"] == "length"


def test_outputs_that_nobody_asked_for_are_absent(http):
    assert set(http.generate(PROMPT, max_tokens=1)) == {"model_name", "model_version", "text_output"}


def test_generate_stream_sends_pieces_that_join_to_the_answer(http):
    pieces = list(http.stream(PROMPT, max_tokens=40, **GREEDY, **USAGE))
    assert "".join(piece["text_output"] for piece in pieces) == answer(40)
    assert sum(piece["num_output_tokens"] for piece in pieces) == 40
    assert {piece["num_input_tokens"] for piece in pieces} == {3}
    assert [piece["finish_reason"] for piece in pieces[:-1]] == ["None"] * (len(pieces) - 1)
    assert pieces[-1]["finish_reason"] == "length"
    assert len(pieces) > 1  # on a busy machine many tokens go out together


def test_generate_stream_without_streaming_is_one_event_with_the_prompt(http):
    (piece,) = http.stream(PROMPT, stream=False, max_tokens=5, **GREEDY)
    assert piece["text_output"] == PROMPT + answer(5)


def test_one_token_is_one_event(http):
    (piece,) = http.stream(PROMPT, max_tokens=1, **GREEDY, **USAGE)
    assert (piece["text_output"], piece["finish_reason"], piece["num_output_tokens"]) == (answer(1), "length", 1)


def test_generate_refuses_more_than_one_response_in_words(http):
    answered = http.post(PROMPT, stream=True, max_tokens=500, **GREEDY)
    assert "generate expects model to produce exactly 1 response" in answered.text


def test_stream_interval_makes_fewer_events(http):
    pieces = list(http.stream(PROMPT, max_tokens=40, stream_interval=16, **GREEDY, **USAGE))
    assert "".join(piece["text_output"] for piece in pieces) == answer(40)
    assert all(piece["num_output_tokens"] >= 16 for piece in pieces[:-1])


def test_the_request_id_comes_back(http):
    assert http.generate(PROMPT, max_tokens=1, id="abc")["id"] == "abc"
    assert {piece["id"] for piece in http.stream(PROMPT, max_tokens=4, id="abc")} == {"abc"}


def test_the_body_of_litellm(http):
    body = {"stream": False, "max_tokens": 4, "temperature": 0.0, "top_p": 1}
    answered = http.generate(None, text_input=PROMPT, parameters=body)
    assert answered["text_output"] == PROMPT + answer(4)


def test_streams_side_by_side_get_their_own_tokens(http):
    prompts = [[3 + number, 900 - number] for number in range(16)]

    def ask(ids: list[int]) -> str:
        text = "".join(chr(0x4E00 + i) for i in ids)
        return "".join(piece["text_output"] for piece in http.stream(text, max_tokens=60, **GREEDY))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts)) == [answer(60, ids) for ids in prompts]


def test_a_version_may_be_named(hash_server, http):
    body = json.dumps({"text_input": PROMPT, "max_tokens": 2, **GREEDY}).encode()
    assert http.post_bytes(body, "versions/1/generate").json()["text_output"] == PROMPT + answer(2)


# The built-in model


def test_a_known_fact(smollm2):
    assert "Paris" in smollm2.generate(PARIS, max_tokens=8, temperature=0, exclude_input_in_output=True)["text_output"]


@pytest.mark.parametrize("prompt", [PARIS, "Grüße aus Köln, 東京 und 👩‍👩‍👧 sagen:", "🎉🎊 emoji party 🥳: 🎈"])
def test_streamed_pieces_join_to_the_text_in_one(smollm2, prompt):
    request = {"max_tokens": 24, "temperature": 0}
    whole = smollm2.generate(prompt, **request)["text_output"]
    assert whole.startswith(prompt)
    assert prompt + "".join(piece["text_output"] for piece in smollm2.stream(prompt, **request)) == whole


def test_concurrent_streams_equal_the_single_ones(smollm2):
    prompts = [PARIS, "Water boils at", "Once upon a time", "The opposite of hot is"]
    start = threading.Barrier(len(prompts))

    def ask(prompt: str) -> str:
        return "".join(piece["text_output"] for piece in smollm2.stream(prompt, max_tokens=16, temperature=0))

    def ask_together(prompt: str) -> str:
        start.wait(60)
        return ask(prompt)

    single = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(ask_together, prompts)) == single
