"""Replies taken apart as they come: reasoning, content and calls, the same however they are cut."""

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from backend_lib.router.chat import ChatTemplate, Delta, ReplyFormat, ReplyParser
from backend_lib.router.chat.reasoning import ReasoningParser, Split
from tests.support.chat_templates import TEMPLATES, TOOLS

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def think(text: str, sizes: list[int] | None = None, *, is_open: bool = False) -> Split:
    parser = ReasoningParser(is_open)
    splits = [*map(parser.push, cut(text, sizes or [])), parser.finish()]
    return Split("".join(each.reasoning for each in splits), "".join(each.content for each in splits))


def whole(text: str, is_open: bool) -> Split:
    """The same of a text that is there in one piece, written as a search."""
    match = re.match(r"\s*<think>", text)
    if match is None and (not is_open or not text.strip()):
        return Split(text.strip("\n"), "") if is_open else Split("", text)
    inside, _, answer = text[match.end() if match else 0 :].partition("</think>")
    return Split(inside.strip("\n"), answer.lstrip("\n"))


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", False, "Hm.", "Yes.\n"),
        ("\n<think>Hm. \n\nSo.</think>Yes.", False, "Hm. \n\nSo.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Yes <think>no</think>.", False, "", "Yes <think>no</think>."),
        ("</think>Yes.", False, "", "</think>Yes."),
        ("</think>Yes.", True, "", "Yes."),
        ("<think>Hm.</think>Yes.</think><think>", False, "Hm.", "Yes.</think><think>"),
        ("<think>Never done\n", False, "Never done", ""),
        ("<think>Hm.</thi", False, "Hm.</thi", ""),
        ("  <thi", False, "", "  <thi"),
        ("  <thi", True, "  <thi", ""),
        ("", False, "", ""),
        ("", True, "", ""),
        (" \n", False, "", " \n"),
        ("Plain.", False, "", "Plain."),
    ],
)
def test_reasoning_and_answer(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert think(text, is_open=is_open) == Split(reasoning, content)


thoughts = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</th", "ink>", "<", "\n", " ", "\n\n", "Hm.", "é"]),
    max_size=10,
).map("".join)
cuts = st.lists(st.integers(0, 9), max_size=30)


@given(thoughts, st.booleans(), cuts)
@example("<think>\n\n\n\nHm.\n\n</think>\n\n\nYes", False, [1] * 30)
@settings(max_examples=600, deadline=None)
def test_reasoning_is_that_of_the_whole_text(text: str, is_open: bool, sizes: list[int]) -> None:
    assert think(text, sizes, is_open=is_open) == whole(text, is_open)


def test_reasoning_is_not_held_back() -> None:
    parser = ReasoningParser()
    texts = ("<think>", "\nHm", "m.", "\n", "So", " </", "i", "</think>", "\n", "Yes", "\n")
    shown = [parser.push(text) for text in texts]
    assert [each.reasoning for each in shown] == ["", "Hm", "m.", "", "\nSo", " ", "</i", "", "", "", ""]
    assert [each.content for each in shown] == [""] * 9 + ["Yes", "\n"]


def make(family: str = "qwen3", **choice: str) -> ReplyFormat:
    return ReplyFormat.of(ChatTemplate(TEMPLATES[family], variables={}), **choice)


def read(parser: ReplyParser, pieces: list[str]) -> Delta:
    deltas = [*map(parser.push, pieces), parser.finish()]
    calls = tuple(call for each in deltas for call in each.tool_calls)
    return Delta("".join(each.content for each in deltas), "".join(each.reasoning for each in deltas), calls)


def functions(delta: Delta) -> list[Any]:
    return [(call["type"], call["function"]["name"], call["function"]["arguments"]) for call in delta.tool_calls]


REPLY = f"<think>\nIs <tool_call> right?\n</think>\n\nI look.\n{CALL}\n{CALL}"


@given(cuts)
@settings(max_examples=60, deadline=None)
def test_reasoning_then_calls(sizes: list[int]) -> None:
    parser = make().parser(prompt="")
    delta = read(parser, cut(REPLY, sizes))
    assert (delta.content, delta.reasoning) == ("I look.", "Is <tool_call> right?")
    assert functions(delta) == [("function", "f", '{"a": 1}')] * 2
    assert parser.has_calls


@pytest.mark.parametrize(
    ("wants", "content", "reasoning", "calls"),
    [
        ({"tools": False}, f"I look.\n{CALL}\n{CALL}", "Is <tool_call> right?", 0),
        ({"reasoning": False}, "<think>\nIs <tool_call> right?\n</think>\n\nI look.", "", 2),
        ({"tools": False, "reasoning": False}, REPLY, "", 0),
    ],
)
def test_what_a_request_does_not_want_is_content(wants: Any, content: str, reasoning: str, calls: int) -> None:
    parser = make().parser(prompt="", **wants)
    delta = read(parser, [REPLY])
    assert (delta.content, delta.reasoning, len(delta.tool_calls)) == (content, reasoning, calls)
    assert parser.has_calls == bool(calls)


def test_the_prompt_says_whether_reasoning_has_begun() -> None:
    text = "Hm.</think>Yes."
    assert read(make().parser(prompt="...assistant\n<think>\n"), [text]) == Delta("Yes.", "Hm.")
    assert read(make().parser(prompt="...<think>\n\n</think>\n\n"), [text]) == Delta(text)


def test_a_reply_that_holds_a_call_alone_has_no_content() -> None:
    parser = make("qwen2.5").parser(prompt="")
    delta = read(parser, list(f"\n{CALL}\n"))
    assert parser.has_calls
    assert (delta.content, functions(delta)) == ("", [("function", "f", '{"a": 1}')])


def ids(family: str = "qwen3", reply: str = f"{CALL}{CALL}", **more: Any) -> list[str]:
    delta = read(make(family).parser(**({"prompt": "p", "seed": 1} | more)), [reply])
    return [call["id"] for call in delta.tool_calls]


def test_ids_are_repeated_by_the_same_request_alone() -> None:
    assert ids() == ids()
    others = [ids(), ids(seed=2), ids(prompt="q"), ids(sequence=1), ids(seed=1 << 63)]
    assert len({each for pair in others for each in pair}) == 10
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for pair in others for each in pair)


def test_mistral_has_ids_of_its_own_kind() -> None:
    own = ids("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]')
    assert len(set(own)) == 2
    assert all(re.fullmatch("[0-9A-Za-z]{9}", each) for each in own)
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}") == ["abcDEF123"]


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "mistral"])
def test_a_call_that_goes_back_into_the_conversation_is_the_call_that_came(family: str) -> None:
    template = ChatTemplate(TEMPLATES[family], variables={"bos_token": "", "eos_token": "<|im_end|>"})
    arguments = {"place": "Zürich <b>", "days": [1, None]}
    call = {"id": "abcDEF123", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    question = {"role": "user", "content": "How warm?"}
    prompt = template.render([question], tools=TOOLS)
    answered = template.render(
        [question, {"role": "assistant", "tool_calls": [call]}], tools=TOOLS, add_generation_prompt=False
    )
    reply = answered.removeprefix(prompt).split("<|im_end|>")[0]
    if family == "mistral":  # its template writes the id behind; the model does not
        reply = reply.replace(', "id": "abcDEF123"', "")
    (again,) = read(ReplyFormat.of(template).parser(prompt=prompt), list(reply)).tool_calls
    assert json.loads(again["function"]["arguments"]) == arguments
    back = [question, {"role": "assistant", "tool_calls": [again | {"id": "abcDEF123"}]}]
    assert template.render(back, tools=TOOLS, add_generation_prompt=False) == answered


def test_auto_is_what_the_template_speaks_of() -> None:
    found = {family: make(family) for family in ("chatml", "qwen2.5", "qwen3", "mistral", "llama3")}
    assert {name: (each.tool_parser, each.reasoning_parser) for name, each in found.items()} == {
        "chatml": ("none", "none"),
        "qwen2.5": ("hermes", "none"),
        "qwen3": ("hermes", "think"),
        "mistral": ("mistral", "none"),
        "llama3": ("llama3", "none"),
    }
    assert make("chatml", tool_parser="llama3", reasoning_parser="think") == ReplyFormat(
        tool_parser="llama3", reasoning_parser="think"
    )
    assert make("qwen3", tool_parser="none", reasoning_parser="none") == ReplyFormat()
    two = ChatTemplate(TEMPLATES["chatml"], tool_source=TEMPLATES["mistral"], variables={})
    assert ReplyFormat.of(two).tool_parser == "mistral"
    assert ReplyFormat.of(ChatTemplate(None, variables={})) == ReplyFormat()


def test_whether_markers_are_special_tokens() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.add_special_tokens([AddedToken("<tool_call>"), AddedToken("<|im_end|>")])
    assert make().needs_special_tokens(tokenizer)
    assert not make().needs_special_tokens(tokenizer, tools=False)
    assert not make("mistral").needs_special_tokens(tokenizer)
    assert make().markers(tools=False) == ("<think>", "</think>")
    assert make().markers(reasoning=False) == ("<tool_call>", "</tool_call>")
    assert make("chatml").markers() == ()
