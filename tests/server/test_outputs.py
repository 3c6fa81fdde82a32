"""What a request may be answered with beside its text, and prompts that are no text, through a real server."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import hash_text
from tests.support.clients import GrpcStream, Response
from tests.support.hashing import EOS_ID, GREEDY, PROMPT, PROMPT_IDS, answer, continuation, prompt_that_ends, text_of

EIGHT = {"max_tokens": 8, **GREEDY}
IDS = continuation(PROMPT_IDS, 8)
IDS_TENSOR = np.array(PROMPT_IDS, np.int32)


def ask(grpc: GrpcStream, text: str | None = PROMPT, **request: Any) -> list[Response]:
    parameters = EIGHT | request.pop("parameters", {})
    return grpc.ask(text, exclude_input_in_output=True, parameters=parameters, **request)


def joined(responses: list[Response], name: str) -> list[Any]:
    return [each for response in responses for each in response.outputs[name].tolist()]


# Token ids


@pytest.mark.parametrize("stream", [True, False])
def test_output_ids(grpc, stream):
    responses = ask(grpc, stream=stream, return_output_ids=True)
    assert joined(responses, "output_ids") == IDS
    assert {response.outputs["output_ids"].dtype for response in responses} == {np.dtype(np.int32)}
    assert "".join(response.text for response in responses) == answer(8)


def test_output_ids_have_the_token_that_ended_it(grpc):
    ids, count = prompt_that_ends()
    (response,) = ask(grpc, text_of(ids), return_output_ids=True, parameters={"ignore_eos": False, "max_tokens": 20})
    assert joined([response], "output_ids") == continuation(ids, count)
    assert continuation(ids, count)[-1] == EOS_ID and response.text == answer(count, ids)


def test_output_ids_of_several_sequences(grpc):
    (response,) = ask(grpc, return_output_ids=True, parameters={"n": 3})
    assert joined([response], "output_ids") == IDS * 3
    assert joined([response], "num_output_tokens") == [8, 8, 8]


def test_output_ids_over_http(http):
    answered = http.generate(PROMPT, **EIGHT, return_output_ids=True)
    assert answered["output_ids"] == IDS


# Log-probabilities


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities(grpc, stream):
    responses = ask(
        grpc, stream=stream, return_logprobs=True, return_cumulative_logprob=True, sampling_parameters='{"logprobs": 3}'
    )
    rows = [row for response in responses for row in json.loads(response.outputs["logprobs"][0])]
    assert [int(next(iter(row))) for row in rows] == IDS
    for token, row in zip(IDS, rows, strict=True):
        # Greedy: the chosen token is the likeliest, and stands for itself and for the first of the three.
        assert [entry["rank"] for entry in row.values()] == [1, 2, 3]
        assert row[str(token)]["decoded_token"] == hash_text([token])
        assert sorted(row, key=lambda key: -row[key]["logprob"])[0] == str(token)
    total = sum(row[str(token)]["logprob"] for token, row in zip(IDS, rows, strict=True))
    assert responses[-1].outputs["cumulative_logprob"][0] == pytest.approx(total, rel=1e-5)
    assert total < 0


def test_log_probabilities_of_the_chosen_token_alone(http):
    answered = http.generate(PROMPT, **EIGHT, return_logprobs=True)
    rows = json.loads(answered["logprobs"])
    assert [list(row) for row in rows] == [[str(token)] for token in IDS]
    assert all(math.isfinite(row[str(token)]["logprob"]) for token, row in zip(IDS, rows, strict=True))


def test_log_probabilities_of_the_prompt(http):
    answered = http.generate(PROMPT, **EIGHT, return_prompt_logprobs=True, prompt_logprobs=1)
    first, *rows = json.loads(answered["prompt_logprobs"])
    assert first is None
    assert [next(iter(row)) for row in rows] == [str(token) for token in PROMPT_IDS[1:]]
    assert "logprobs" not in answered


# Where the text ends


def test_the_stop_string_may_stay(http):
    stop = answer(5)[3:]
    for include, text in ((False, answer(3)), (True, answer(5))):
        asked = {"stop": stop, "include_stop_str_in_output": include, "exclude_input_in_output": True}
        assert http.generate(PROMPT, **EIGHT, **asked)["text_output"] == text


def test_special_tokens_may_be_text(http):
    ids, count = prompt_that_ends()
    asked = {"max_tokens": count, "skip_special_tokens": False, "exclude_input_in_output": True, **GREEDY}
    assert http.generate(text_of(ids), **asked)["text_output"] == answer(count, ids) + "<eos>"


@pytest.mark.parametrize("name", ["stop", "stop_words"])
def test_stop_strings_as_a_tensor(grpc, http, name):
    stops = np.array([b"nothing", answer(4)[3].encode()], dtype=object)
    (response,) = ask(grpc, **{name: stops})
    assert response.text == answer(3)
    body = {name: ["nothing", answer(4)[3]], "exclude_input_in_output": True}
    assert http.generate(PROMPT, **EIGHT, **body)["text_output"] == answer(3)


def test_an_empty_list_of_stop_strings(http):
    assert http.generate(PROMPT, stop=[], bad_words=[], **EIGHT)["text_output"] == PROMPT + answer(8)


# Prompts that are no text


def test_a_prompt_of_token_ids(grpc, http):
    (response,) = ask(grpc, None, input_ids=IDS_TENSOR, return_num_input_tokens=True)
    assert response.text == answer(8) and response.outputs["num_input_tokens"][0] == len(PROMPT_IDS)
    assert http.generate(None, input_ids=list(PROMPT_IDS), **EIGHT)["text_output"] == PROMPT + answer(8)
    in_json = json.dumps({"prompt_token_ids": PROMPT_IDS})
    assert http.generate(None, sampling_parameters=in_json, **EIGHT)["text_output"] == PROMPT + answer(8)


def test_a_prompt_of_too_many_token_ids(grpc):
    words = grpc.error(None, input_ids=np.full(1 << 16, 5, np.int32))
    assert words == "'input_ids' has 65536 tokens; allowed are at most 65535, so that one more fits in 65536"


def test_a_prompt_of_none_or_two_spellings(grpc, http):
    assert http.error(None, max_tokens=1) == (
        400, "'text_input' is missing; allowed is one of text_input, input_ids, messages",
    )  # fmt: skip
    assert "'text_input' and 'input_ids' are both given" in grpc.error(PROMPT, input_ids=IDS_TENSOR)


def messages(*texts: str) -> str:
    return json.dumps([{"role": "user", "content": text} for text in texts])


def test_a_conversation(grpc, http):
    (response,) = grpc.ask(None, messages=messages(PROMPT[:2], PROMPT[2]), parameters=EIGHT)
    assert response.text == answer(8), "the prompt is not repeated"
    assert http.generate(None, messages=messages(PROMPT), **EIGHT)["text_output"] == answer(8)
    in_json = json.dumps({"messages": json.loads(messages(PROMPT))})
    assert http.generate(None, sampling_parameters=in_json, **EIGHT)["text_output"] == answer(8)


def test_the_prompt_of_a_conversation_is_the_templates(http):
    body = {"messages": messages(PROMPT), "exclude_input_in_output": False, **EIGHT}
    assert http.generate(None, **body)["text_output"] == f"user: {PROMPT}</think>{answer(8)}"


def test_tools_stand_in_the_prompt_unless_none_is_the_choice(http):
    tools = json.dumps([{"type": "function", "function": {"name": hash_text([9])}}])
    body = {"messages": messages(PROMPT), "tools": tools, **EIGHT}
    assert http.generate(None, **body)["text_output"] == answer(8, (*PROMPT_IDS, 9))
    assert http.generate(None, tool_choice="none", **body)["text_output"] == answer(8)


@pytest.mark.parametrize("stream", [True, False])
def test_reasoning_is_an_output_of_its_own(grpc, stream):
    parameters = EIGHT | {"chat_template_kwargs": '{"think": true}'}
    request = {"messages": messages(PROMPT), "stream": stream, "return_reasoning_content": True}
    responses = grpc.ask(None, **request, parameters=parameters)
    assert "".join(each.decode() for each in joined(responses, "reasoning_content")) == answer(8)
    assert "".join(response.text for response in responses) == ""
    plain = grpc.ask(None, messages=messages(PROMPT), parameters=parameters)
    assert plain[0].text == answer(8) and "reasoning_content" not in plain[0].outputs


def test_what_a_template_does_not_take(http):
    status, words = http.error(None, messages='[{"content": "x"}]')
    assert (status, words.startswith("'messages[0].role' is missing")) == (400, True)
