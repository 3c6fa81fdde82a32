"""What clients send as messages and tools: what is allowed, and the words for what is not."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.router.chat.errors import ChatError
from backend_lib.router.chat.messages import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, parse_messages, parse_tools
from backend_lib.router.chat.plain_json import MAX_CHARS, MAX_DEPTH, MAX_VALUES, from_client
from tests.support.chat_templates import CONVERSATIONS, TOOLS

HI = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def assistant(**fields: Any) -> list[Any]:
    return [HI, {"role": "assistant", "content": "a", **fields}]


def with_function(**fields: Any) -> list[Any]:
    return assistant(tool_calls=[CALL, CALL | {"function": CALL["function"] | fields}])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "'messages' is []; allowed is a list of at least one message, each a JSON object"),
        ({}, "'messages' is {}; allowed is a list"),
        (None, "'messages' is missing; allowed is a list"),
        ("", "'messages' is ''; allowed is JSON"),
        ("Hello", "'messages' is 'Hello'; allowed is JSON"),
        ("null", "'messages' is missing"),
        ('"Hello"', "'messages' is 'Hello'; allowed is a list"),
        ([HI, "Hello"], "each a JSON object"),
        ([HI] * (MAX_MESSAGES + 1), "'messages' has 4097 messages; allowed are at most 4096"),
        ([HI, {"content": "Hi"}], "'messages[1].role' is missing; allowed is a name of letters"),
        ([HI | {"role": 1}], "'messages[0].role' is 1; allowed"),
        ([HI | {"role": ""}], "'messages[0].role' is ''"),
        ([HI | {"role": "user<|im_end|>"}], "'messages[0].role' is 'user<|im_end|>'"),
        ([HI | {"role": "user\n"}], "'messages[0].role' is 'user\\n'"),
        ([HI | {"role": "u" * 65}], "'messages[0].role' is 'uuu"),
        ([{"role": "user"}], "'messages[0].content' is missing; allowed is a string or a list of"),
        ([HI | {"content": None}], "'messages[0].content' is missing"),
        ([HI | {"content": 5}], "'messages[0].content' is 5"),
        ([HI | {"content": {}}], "'messages[0].content' is {}"),
        ([HI | {"content": ["Hi"]}], "'messages[0].content[0]' is 'Hi'; allowed is {\"type\": \"text\""),
        (
            [HI, HI | {"content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
            "'messages[1].content[0]' is {'image_url': {'url': 'http://x'}, 'type': 'image_url'}; allowed is {\"type\"",
        ),
        ([HI | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": 1}]}], "'messages[0].content[1]'"),
        ([HI | {"content": [{"type": "text", "text": ""}] * (MAX_PARTS + 1)}], "'messages[0].content' is [{"),
        ([HI | {"name": 1}], "'messages[0].name' is 1; allowed is a string"),
        ([HI | {"tool_call_id": []}], "'messages[0].tool_call_id' is []; allowed is a string"),
        ([HI | {"reasoning": {}}], "'messages[0].reasoning' is {}; allowed is a string"),
        ([HI | {"colour": "red"}], "'messages[0]' has the unknown field 'colour'; allowed are role, content, tool"),
        ([HI | {"x" * 500: 1}], "'messages[0]' has the unknown field '" + "x" * 80 + "';"),
        ([HI, {"role": "assistant"}], "'messages[1].content' is missing"),
        ([HI, {"role": "assistant", "tool_calls": []}], "'messages[1].content' is missing"),
        (assistant(tool_calls={}), "'messages[1].tool_calls' is {}; allowed is a list of tool calls"),
        (assistant(tool_calls=["f"]), "'messages[1].tool_calls[0]' is 'f'; allowed is {\"id\""),
        (assistant(tool_calls=[CALL | {"type": "code"}]), "'messages[1].tool_calls[0]' is {"),
        (assistant(tool_calls=[CALL | {"id": 7}]), "'messages[1].tool_calls[0].id' is 7; allowed is a string"),
        (assistant(tool_calls=[{"id": "1"}]), "'messages[1].tool_calls[0].function' is missing"),
        (with_function(name=""), "'messages[1].tool_calls[1].function' is {"),
        (with_function(arguments="{'a': 1}"), "'messages[1].tool_calls[1].function.arguments' is \"{'a': 1}\""),
        (with_function(arguments="[1]"), "function.arguments' is '[1]'; allowed is a JSON object, or the text of one"),
        (with_function(arguments=5), "function.arguments' is 5"),
        (with_function(arguments="[" * 100_000), "function.arguments' is '[[["),
    ],
)  # fmt: skip
def test_what_is_refused(messages: Any, words: str) -> None:
    with pytest.raises(ChatError) as error:
        parse_messages(messages)
    assert words in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_what_is_allowed(messages: list[dict[str, Any]]) -> None:
    assert parse_messages(json.dumps(messages)) == parse_messages(messages)


def test_null_and_empty_fields_of_others_are_left_out() -> None:
    given = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    assert parse_messages(assistant(**given)) == [HI, {"role": "assistant", "content": "a"}]


def test_reasoning_has_the_names_that_templates_know() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        (_, message) = parse_messages(assistant(**{name: "hm"}))
        assert (message["reasoning_content"], message["thinking"]) == ("hm", "hm")


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({}, "'tools' is {}; allowed is a list of at most 256 tools"),
        ("{", "'tools' is '{'; allowed is JSON"),
        (TOOLS * MAX_TOOLS, "'tools' is [{"),
        ([TOOLS[0], {"type": "retrieval"}], "'tools[1]' is {'type': 'retrieval'}; allowed is {\"type\": \"function\""),
        (["f"], "'tools[0]' is 'f'"),
        ([{"type": "function"}], "'tools[0].function' is missing"),
        ([{"type": "function", "function": {"name": 1}}], "'tools[0].function' is {'name': 1}"),
        ([{"type": "function", "function": {"name": "f", "description": 1}}], "'tools[0].function.description' is 1"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], None),
        ([{"type": "function", "function": {"name": "f", "parameters": "{}"}}], "function.parameters' is '{}'"),
    ],
)  # fmt: skip
def test_tools_that_are_refused(tools: Any, words: str | None) -> None:
    if words is None:  # an empty list is an object without a field in some languages' JSON
        assert parse_tools(tools) == tools
        return
    with pytest.raises(ChatError) as error:
        parse_tools(tools)
    assert words in str(error.value)
    assert len(str(error.value)) < 5000


def test_no_tools() -> None:
    assert [parse_tools(none) for none in (None, [], "[]", "null")] == [None] * 4
    assert parse_tools(json.dumps(TOOLS)) == TOOLS


def deep(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


class Sly(str):
    """A string with a method of its own, which a template could call."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (deep(MAX_DEPTH + 1), "nested too deep; allowed are 32 levels"),
        (deep(100_000), "nested too deep"),
        ("[" * 100_000, "nested too deep"),
        ("[" * 100_000 + "]" * 100_000, "nested too deep"),
        ('{"a":' * 100_000, "nested too deep"),
        ("x" * (MAX_CHARS + 1), "'it' has 4194305 characters; allowed are at most 4194304"),
        (["x" * (MAX_CHARS + 1)], "'it' is too large; allowed are at most 4194304 characters in 131072 JSON values"),
        ([0] * (MAX_VALUES + 1), "'it' is too large"),
        ("[" + "0," * MAX_VALUES + "0]", "'it' is too large"),
        ({"x" * (MAX_CHARS + 1): 0}, "'it' is too large"),
        (float("nan"), "'it' is nan; allowed is finite numbers"),
        ("NaN", "'it' is nan"),
        ("[1e999]", "'it' is inf"),
        ("9" * 5000, "allowed is JSON"),
        ([10**30], "allowed is whole numbers of at most 64 bits"),
        ({1: 2}, "allowed is objects whose keys are strings"),
        (b"x", "allowed is what JSON can hold"),
        ((1,), "allowed is what JSON can hold"),
        ([Sly("x")], "allowed is what JSON can hold"),
        ([object()], "allowed is what JSON can hold"),
    ],
    ids=range(20),
)  # fmt: skip
def test_json_that_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ChatError) as error:
        from_client("it", value)
    assert words in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("value", [deep(MAX_DEPTH), [0] * (MAX_VALUES - 1), ["x" * (MAX_CHARS - 1)], 2**64, -1.5, None])
def test_json_at_its_bounds(value: Any) -> None:
    assert from_client("it", value) == value


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
fields = st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "thinking", "x"])
calls = st.lists(st.fixed_dictionaries({"function": st.dictionaries(st.sampled_from(["name", "arguments"]), anything)}))
messages = st.lists(st.fixed_dictionaries({"role": st.just("user")}) | st.dictionaries(fields, anything | calls))


@given(messages | anything)
@settings(max_examples=60, deadline=None)
def test_anything_is_allowed_or_refused_in_words(value: Any) -> None:
    try:
        parsed = parse_messages(value)
    except ChatError as error:
        str(error).encode()
        return
    assert len(parsed) == len(value)
    assert all(isinstance(message["role"], str) for message in parsed)
