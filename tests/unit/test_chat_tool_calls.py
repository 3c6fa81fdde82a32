"""Calls of tools are found in a reply however it is cut, and what is none is content, with nothing lost."""

import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend_lib.router.chat.calls import Call, Piece
from backend_lib.router.chat.json_scanner import JsonScanner
from backend_lib.router.chat.tool_calls import TOOL_PARSERS, detect_tool_parser
from tests.support.chat_templates import TEMPLATES


def read(name: str, text: str, sizes: list[int] | None = None) -> list[Piece]:
    reader, pieces, at = TOOL_PARSERS[name](), [], 0
    for size in sizes or [len(text)]:
        pieces += reader.push(text[at : at + size])
        at += size
    pieces += reader.push(text[at:]) + reader.finish()
    assert "".join(piece.raw for piece in pieces) == text
    assert all(piece.content in ("", piece.raw) for piece in pieces)
    assert all(piece.content or piece.calls or piece.raw.isspace() for piece in pieces)
    return pieces


def split(pieces: list[Piece]) -> tuple[str, list[Call]]:
    return "".join(piece.content for piece in pieces), [call for piece in pieces for call in piece.calls]


def call(name: str, arguments: dict[str, Any], call_id: str = "") -> Call:
    return Call(name, json.dumps(arguments, ensure_ascii=False), call_id)


F, G = call("f", {}), call("g", {"x": 'ü </tool_call> "}]; [TOOL_CALLS]', "y": [1, -0.5e-3, {"z": None}]})
F_TEXT = '{"name": "f", "arguments": {}}'
G_TEXT = json.dumps({"name": "g", "arguments": json.loads(G.arguments)})
F_LLAMA, G_LLAMA = (text.replace('"arguments"', '"parameters"', 1) for text in (F_TEXT, G_TEXT))

HALF = Call("f", r'{"a": "\ud800"}')

FOUND: list[tuple[str, str, str, list[Call]]] = [
    ("hermes", "Just text. {}", "Just text. {}", []),
    ("hermes", "", "", []),
    ("hermes", f"<tool_call>\n{F_TEXT}\n</tool_call>", "", [F]),
    ("hermes", f"<tool_call>{G_TEXT}</tool_call>", "", [G]),
    ("hermes", f"Wait.\n\n<tool_call>\n{F_TEXT}\n</tool_call>\n<tool_call>{G_TEXT}</tool_call>\n", "Wait.", [F, G]),
    ("hermes", f"<tool_call>{F_TEXT}</tool_call>\nDone.\n", "\nDone.\n", [F]),
    ("hermes", f"<tool_call>{F_TEXT}", "", [F]),
    ("hermes", f"<tool_call>{F_TEXT}\n</tool_", "", [F]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [call("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2\t"}}</tool_call>', "", [call("f", {"a": "1\n2\t"})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [call("f", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "", [HALF]),
    ("hermes", f"a <tool_call> b <tool_call>{F_TEXT}</tool_call>", "a <tool_call> b", [F]),
    ("hermes", f"<tool_call><tool_call>{F_TEXT}</tool_call>", "<tool_call>", [F]),
    ("hermes", f'<tool_call>{{"name": <tool_call>{F_TEXT}</tool_call>', '<tool_call>{"name": ', [F]),
    ("llama3", "Just text.", "Just text.", []),
    ("llama3", F_LLAMA, "", [F]),
    ("llama3", f"\n\n{F_LLAMA}; {G_LLAMA};{F_TEXT}\n", "", [F, G, F]),
    ("llama3", f"<|python_tag|>{G_LLAMA}", "", [G]),
    ("llama3", f"I will look. <|python_tag|>{F_LLAMA} ; {F_LLAMA}", "I will look.", [F, F]),
    ("llama3", '<|python_tag|>{"name": "f"}', "", [F]),
    ("llama3", '{"type": "function", "name": "f", "parameters": {}}', "", [F]),
    ("llama3", f"{F_LLAMA}; then?", "; then?", [F]),
    ("llama3", f"{F_LLAMA} then?", " then?", [F]),
    ("llama3", f"{F_LLAMA}<|python_tag|>{F_LLAMA}", "", [F, F]),
    ("llama3", f"Text first {F_LLAMA}", f"Text first {F_LLAMA}", []),
    ("mistral", "Just [text].", "Just [text].", []),
    ("mistral", f"[TOOL_CALLS] [{F_TEXT}]", "", [F]),
    ("mistral", f"[TOOL_CALLS][{F_TEXT}, {G_TEXT}]\n", "", [F, G]),
    ("mistral", "[TOOL_CALLS]f{}", "", [F]),
    ("mistral", f"Hm. [TOOL_CALLS]f{{}}[TOOL_CALLS]g{G.arguments}", "Hm.", [F, G]),
    ("mistral", "[TOOL_CALLS]f[ARGS]{}", "", [F]),
    ("mistral", "[TOOL_CALLS] f [ARGS] {}", "[TOOL_CALLS] f [ARGS] {}", []),
    ("mistral", "[TOOL_CALLS] f {}", "", [F]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{}", "", [Call("f", "{}", "abcDEF123")]),
]  # fmt: skip

NONE = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>{"),
    ("hermes", "<tool_call>\n\n"),
    ("hermes", "  <tool_cal"),
    ("hermes", "<tool_call>f(x)</tool_call>"),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} </tool_calls>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} </tool_x'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": \\x}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 200),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>"),
    ("hermes", f"<tool_call>[{F_TEXT}]</tool_call>"),
    ("llama3", '{"answer": 42}'),
    ("llama3", '{"name": "Ada"}'),
    ("llama3", '{"name": "f", "parameters": {}, "comment": 1}'),
    ("llama3", '{"name": "f", "parameters": {}'),
    ("llama3", '{"name": "f", "parameters": }; {}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("llama3", "<|python_tag|>{}"),
    ("llama3", " \n"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", f"[TOOL_CALLS] [{F_TEXT}, 5]"),
    ("mistral", f"[TOOL_CALLS] [{F_TEXT}"),
    ("mistral", "[TOOL_CALLS]{}"),
    ("mistral", "[TOOL_CALLS]f(1)"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]"),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), FOUND)
def test_calls_that_are_found(name: str, text: str, content: str, calls: list[Call]) -> None:
    assert split(read(name, text)) == (content, calls)


@pytest.mark.parametrize(("name", "text"), NONE)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    assert split(read(name, text)) == (text, [])


@pytest.mark.parametrize(("name", "text"), [*NONE, *((name, text) for name, text, _, _ in FOUND)])
def test_one_character_at_a_time_is_the_same(name: str, text: str) -> None:
    assert split(read(name, text, [1] * len(text))) == split(read(name, text))


PARTS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "<|python_tag|>", "<|python", "[TOOL_CALLS]", "[TOOL_"),
    *("[ARGS]", "[CALL_ID]", "{", "}", "[", "]", ";", ",", ":", '"', "\\", " ", "\n", "\x1c", " " * 70, "f", "tr", "1"),
    *('"name": "f"', '"arguments": {}', '"parameters": {"a": [true, 1.5]}', F_TEXT, G_LLAMA, "true", "-0.1e5", "é🎉"),
    *(f"<tool_call>{F_TEXT}</tool_call>", f"<|python_tag|>{F_LLAMA}", f"[TOOL_CALLS] [{F_TEXT}]", "[TOOL_CALLS]g{}"),
]
texts = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)
cuts = st.lists(st.integers(0, 9), max_size=40)


@given(st.sampled_from(list(TOOL_PARSERS)), texts, cuts)
@example("hermes", '<tool_call>{"a": trxe<tool_call>', [16, 2])
@example("hermes", f"<tool_call>{F_TEXT}" + " " * 80, [40, 60])
@settings(max_examples=600, deadline=None)
def test_nothing_is_lost_and_the_cut_does_not_matter(name: str, text: str, sizes: list[int]) -> None:
    assert split(read(name, text, sizes)) == split(read(name, text))


names = st.text(min_size=1, max_size=8).filter(lambda name: name.isprintable())
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
some_calls = st.lists(
    st.builds(call, names, st.dictionaries(st.text(max_size=5), values, max_size=3)), min_size=1, max_size=3
)


@given(some_calls, st.booleans(), cuts)
@settings(max_examples=150, deadline=None)
def test_calls_as_templates_write_them_are_read_back(calls: list[Call], ascii_only: bool, sizes: list[int]) -> None:
    def written(key: str) -> list[str]:
        objects = [{"name": each.name, key: json.loads(each.arguments)} for each in calls]
        return [json.dumps(each, ensure_ascii=ascii_only) for each in objects]

    hermes = "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written("arguments"))
    assert split(read("hermes", f"So:\n{hermes}", sizes)) == ("So:", calls)
    assert split(read("llama3", "; ".join(written("parameters")), sizes)) == ("", calls)
    assert split(read("mistral", f"[TOOL_CALLS] [{', '.join(written('arguments'))}]", sizes)) == ("", calls)


@given(values)
@settings(max_examples=150, deadline=None)
def test_the_scanner_finds_the_end_of_what_json_writes(value: Any) -> None:
    for indent in (None, 2):
        text, scanner = json.dumps([value], indent=indent), JsonScanner()
        assert scanner.read(text + "]x", 0) == len(text)
        assert scanner.done and not scanner.failed


json_parts = st.sampled_from(
    [*'{}[],:" \n', '"a"', "1", "-", "0", "1.", "e5", "true", "nul", '"\\', "\\u12", '{"a":', "é"]
)


@given(st.sampled_from("{["), st.lists(json_parts, max_size=12).map("".join))
@settings(max_examples=600, deadline=None)
def test_the_scanner_lets_through_what_json_does(opening: str, rest: str) -> None:
    """But for wrong escapes in a string, which it does not look into."""
    scanner, text = JsonScanner(), opening + rest
    end = scanner.read(text, 0)
    try:
        _, length = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError as error:
        assert not scanner.done or "escape" in str(error)
    else:
        assert (scanner.done, end) == (True, length)


def test_content_is_not_held_back() -> None:
    reader = TOOL_PARSERS["hermes"]()
    texts = ("Hello", " wor", "ld <", "3 <tool", "box> ", "x", "<tool_call>", "no")
    shown = [split(reader.push(text))[0] for text in texts]
    assert shown == ["Hello", " wor", "ld", " <3", " <toolbox>", " x", "", "<tool_call>no"]


def test_a_call_is_given_as_soon_as_it_is_complete() -> None:
    reader = TOOL_PARSERS["llama3"]()
    assert split(reader.push(F_LLAMA[:-1])) == ("", [])
    assert split(reader.push("}")) == ("", [F])


UNITS = ["<tool_call>", '<tool_call>{"a":"', '<tool_call>{"a', "[TOOL_CALLS]f", F_LLAMA + ";", "\n", " <"]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("beginning", ["", '<tool_call>{"a": "\\', '[TOOL_CALLS] [{"a": "\\', '{"a": "\\'])
@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_the_cost_grows_with_the_text_alone(name: str, beginning: str, unit: str) -> None:
    """In processor time of this thread, with much room; going back over the text would take minutes."""
    reader, text = TOOL_PARSERS[name](), beginning + unit * (20_000 // len(unit))
    start = time.thread_time()
    for at in range(0, len(text), 4):
        reader.push(text[at : at + 4])
    reader.finish()
    assert time.thread_time() - start < 5


def test_the_format_is_the_one_that_the_template_teaches() -> None:
    found = {family: detect_tool_parser(source) for family, source in TEMPLATES.items()}
    assert found == {
        "chatml": "none",
        "llama3": "llama3",
        "qwen2.5": "hermes",
        "qwen3": "hermes",
        "mistral": "mistral",
        "gemma": "none",
        "phi3": "none",
    }
    assert detect_tool_parser("<tool_call>\n<function=f>\n<parameter=x>") == "none"
    assert detect_tool_parser("") == "none"
