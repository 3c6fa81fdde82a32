"""The three spellings of a prompt, and orders to end a request."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from backend_lib.config import Settings
from backend_lib.request import Chat, GenerationRequest
from backend_lib.router.contract import parse_request
from backend_lib.router.refusals import RequestError
from backend_lib.router.sources import is_cancellation

VOCAB = 1024
MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = {"text_input": np.array([b"hi"], dtype=object)}


def parse(tensors: dict[str, Any], contract: str = "vllm", **parameters: Any) -> GenerationRequest:
    arrays = {name: np.array(value) for name, value in tensors.items()}
    return parse_request(arrays, parameters, "", 0, Settings(contract=contract), VOCAB)


def in_json(**values: Any) -> GenerationRequest:
    return parse({}, sampling_parameters=json.dumps(values))


def error(tensors: dict[str, Any], **parameters: Any) -> str:
    with pytest.raises(RequestError) as caught:
        parse(tensors, **parameters)
    return str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "parameters"),
    [
        ({"input_ids": np.array([5, 6, 1023], np.int32)}, {}),
        ({"input_ids": np.array([[5, 6, 1023]], np.int32)}, {}),
        ({}, {"prompt_token_ids": "[5, 6, 1023]"}),
        ({}, {"input_ids": "[5, 6, 1023]"}),
        ({}, {"sampling_parameters": '{"prompt_token_ids": [5, 6, 1023]}'}),
        ({"input_ids": np.array([5, 6, 1023, 0, 0], np.int32), "input_lengths": np.array([3], np.int32)}, {}),
    ],
)
def test_a_prompt_of_token_ids(tensors, parameters):
    request = parse(tensors, **parameters)
    assert (request.prompt_ids, request.text, request.chat) == ((5, 6, 1023), "", None)
    assert request.output.echo_prompt


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "'text_input' is missing; allowed is one of text_input, input_ids, messages"),
        (TEXT | {"input_ids": [5]}, "'text_input' and 'input_ids' are both given; allowed is one of"),
        ({"input_ids": [5], "messages": b"[]"}, "'input_ids' and 'messages' are both given"),
        ({"input_ids": np.array([], np.int32)}, "'input_ids' is []; allowed is at least one token id"),
        ({"input_ids": [5, -1]}, "'input_ids' is [5, -1]; allowed is a list of at most 16777216 whole numbers, each"),
        ({"input_ids": [5, 1024]}, "each from 0 to 1023"),
        ({"input_ids": [5.5]}, "'input_ids' is 5.5"),
        ({"input_ids": [5, 6], "input_lengths": [3]}, "'input_lengths' is 3; allowed is at most the number of"),
        (TEXT | {"tools": b'[{"type": "function"}]'}, "'tools' is given without 'messages'; allowed is only with them"),
        (TEXT | {"tool_choice": np.array([b"auto"], object)}, "'tool_choice' is given without 'messages'"),
        (TEXT | {"chat_template_kwargs": b'{"a": 1}'}, "'chat_template_kwargs' is given without 'messages'"),
        ({"input_ids": [5], "add_generation_prompt": True}, "'add_generation_prompt' is given without 'messages'"),
        ({"prompt_token_ids": [5], "messages": b"[]"}, "'prompt_token_ids' and 'messages' are both given"),
        ({"prompt_token_ids": [5], "input_lengths": [2]}, "allowed is at most the number of 'prompt_token_ids', which"),
        ({"input_ids": [5, 6], "input_lengths": [0]}, "'input_lengths' is 0; allowed is a whole number from 1"),
    ],
)
def test_what_is_no_prompt(tensors, words):
    assert words in error(tensors)


def test_a_hundred_thousand_ids_are_read_quickly():
    """By their ends, not one by one."""
    ids = np.arange(100_000, dtype=np.int32) % VOCAB
    assert parse({"input_ids": ids}).prompt_ids == tuple(ids.tolist())


# Conversations


def test_a_conversation():
    tools = [{"type": "function", "function": {"name": "f"}}]
    request = in_json(messages=MESSAGES, tools=tools, chat_template_kwargs={"a": 1}, add_generation_prompt=False)
    assert request.chat == Chat(messages=MESSAGES, tools=tools, add_generation_prompt=False, variables={"a": 1})
    assert request.text == "" and request.prompt_ids == ()
    as_text = parse({"messages": np.array([json.dumps(MESSAGES).encode()], dtype=object)}, tools=json.dumps(tools))
    assert as_text.chat == Chat(messages=json.dumps(MESSAGES), tools=json.dumps(tools))


@pytest.mark.parametrize(
    ("choice", "offered"), [({}, "[1]"), ({"tool_choice": "auto"}, "[1]"), ({"tool_choice": "none"}, None)]
)
def test_tools_are_left_out_where_none_is_the_choice(choice, offered):
    assert in_json(messages=MESSAGES, tools="[1]", **choice).chat.tools == offered


def test_a_conversation_is_not_repeated_unless_it_is_asked_for():
    assert not in_json(messages=MESSAGES).output.echo_prompt
    assert in_json(messages=MESSAGES, exclude_input_in_output=False).output.echo_prompt


def test_what_a_template_takes_is_checked():
    assert "'chat_template_kwargs' is" in error({}, messages="[]", chat_template_kwargs='{"messages": 1}')
    assert "'tool_choice' is 'required'; allowed is auto or none" in error({}, messages="[]", tool_choice="required")


# Orders to end a request


@pytest.mark.parametrize(
    ("tensors", "parameters", "contract", "expected"),
    [
        ({"cancel": [True]}, {}, "vllm", True),
        ({"cancel": [[True]]}, {}, "trtllm", True),
        ({"cancel": [False]}, {"cancel": True}, "vllm", False),
        ({}, {"cancel": "true"}, "vllm", True),
        ({}, {"cancel": "maybe"}, "vllm", False),
        ({"cancel": [True, True]}, {}, "vllm", False),
        ({"stop": [[True]]}, {}, "trtllm", True),
        ({"stop": [[False]]}, {}, "trtllm", False),
        ({"stop": np.array([b"true"], dtype=object)}, {}, "vllm", False),
        ({}, {"stop": "true"}, "trtllm", False),
        ({}, {}, "vllm", False),
    ],
)
def test_what_is_an_order(tensors, parameters, contract, expected):
    arrays = {name: np.array(value) for name, value in tensors.items()}
    assert is_cancellation(arrays, parameters, contract) is expected


def test_an_order_that_cannot_be_understood_is_refused():
    assert error(TEXT, cancel="maybe") == "'cancel' is 'maybe'; allowed is true or false"
    assert "'cancel' is True; allowed is true as an input" in error(TEXT, sampling_parameters='{"cancel": true}')


def test_an_order_that_is_none_changes_nothing():
    assert parse(TEXT | {"cancel": [False]}) == parse(TEXT)
    assert parse(TEXT | {"stop": [[False]]}, contract="trtllm") == parse(TEXT)
    stops = {"stop_words": np.array([[b"a", b"b"]], dtype=object)}
    assert parse(TEXT | stops, contract="trtllm").sampling.stop == ("a", "b")
