"""Regular expressions in Python's meaning, written anew in the part of the language that xgrammar reads alike.

Left to itself xgrammar drops anchors inside an expression, takes escapes it does not know for letters, lets the dot
match the end of a line, and puts the pattern of a JSON string into the JSON text as it is, quotes and all. What is
written here may match less than the expression (\\w is ASCII), never more.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from backend_lib.worker.grammar import characters
from backend_lib.worker.grammar.characters import Ranges

if sys.version_info >= (3, 11):
    from re import _constants as names
    from re import _parser as parser
else:
    import sre_constants as names
    import sre_parse as parser

_BEGINNINGS = (names.AT_BEGINNING, names.AT_BEGINNING_STRING)
_ENDS = (names.AT_END, names.AT_END_STRING)
_CATEGORIES: dict[Any, tuple[Ranges | None, Callable[[], Ranges]]] = {
    names.CATEGORY_DIGIT: (characters.DIGITS, characters.decimals),
    names.CATEGORY_SPACE: (None, characters.spaces),
    names.CATEGORY_WORD: (characters.WORD, lambda: characters.union(characters.WORD, characters.BEYOND_ASCII)),
}
_OPPOSITES = {
    names.CATEGORY_NOT_DIGIT: names.CATEGORY_DIGIT,
    names.CATEGORY_NOT_SPACE: names.CATEGORY_SPACE,
    names.CATEGORY_NOT_WORD: names.CATEGORY_WORD,
}
_WORDS = {
    names.ASSERT: "look-around", names.ASSERT_NOT: "look-around", names.GROUPREF: "a back-reference",
    names.GROUPREF_EXISTS: "a condition", names.AT: "an anchor in the middle, or \\b or \\B,",
}  # fmt: skip
# Characters that a JSON string holds only as an escape.
_ESCAPED: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}


def checked_regex(source: str) -> str:
    """For a whole text.

    Raises:
        ValueError: the expression is none, or holds something that could not be kept to.
    """
    return _Writer(quoted=False).written(source)


def json_pattern(source: str) -> str:
    """For the inside of a JSON string whose value is to match. Raises ValueError as `checked_regex` does."""
    return _Writer(quoted=True).written(source)


class _Writer:
    """`quoted`: for text inside a JSON string."""

    def __init__(self, *, quoted: bool) -> None:
        self._quoted = quoted

    def written(self, source: str) -> str:
        try:
            parsed = parser.parse(source)
        except (re.error, OverflowError) as error:
            raise ValueError(str(error)) from None
        if parsed.state.flags & ~re.UNICODE:
            raise ValueError("flags are not supported")
        return self._sequence(parsed, first=True, last=True)

    def _one_of(self, ranges: Ranges) -> str:
        if not ranges:
            raise ValueError("a class without characters is not supported")
        if not self._quoted:
            return _class(ranges)
        plain = characters.without(ranges, _ESCAPED)
        escapes = [letter for code, letter in _SHORT.items() if characters.among(ranges, code)]
        parts = [_class(plain)] * bool(plain) + [r"\\" + _class(characters.of(map(ord, escapes)))] * bool(escapes)
        if not parts:
            raise ValueError("control characters are not supported")
        return parts[0] if parts == [_class(plain)] else f"(?:{'|'.join(parts)})"

    def _sequence(self, items: Any, *, first: bool, last: bool) -> str:
        """`first`, `last`: whether nothing stands before or behind it in the whole expression."""
        count = len(items)
        return "".join(
            self._item(kind, value, first=first and i == 0, last=last and i == count - 1)
            for i, (kind, value) in enumerate(items)
        )

    def _item(self, kind: Any, value: Any, *, first: bool, last: bool) -> str:
        if kind is names.AT and ((first and value in _BEGINNINGS) or (last and value in _ENDS)):
            return ""  # the whole text is matched anyway
        if kind is names.BRANCH:
            return self._group([self._sequence(each, first=first, last=last) for each in value[1]])
        if kind is names.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise ValueError("flags are not supported")
            return self._group([self._sequence(inner, first=first, last=last)])
        if kind in (names.MAX_REPEAT, names.MIN_REPEAT):
            return self._repeat(*value)
        return self._one_of(_characters(kind, value))

    def _group(self, parts: list[str]) -> str:
        return f"(?:{'|'.join(parts)})"

    def _repeat(self, low: int, high: Any, inner: Any) -> str:
        bounds = f"{{{low},{'' if high is names.MAXREPEAT else high}}}"
        return self._group([self._sequence(inner, first=False, last=False)]) + bounds


def _characters(kind: Any, value: Any) -> Ranges:
    if kind is names.LITERAL:
        return _code(value)
    if kind is names.NOT_LITERAL:
        return characters.without(characters.ALL, _code(value))
    if kind is names.ANY:
        return characters.without(characters.ALL, _code(ord("\n")))
    if kind is names.IN:
        return _set(value)
    raise ValueError(f"{_WORDS.get(kind, str(kind).lower())} is not supported")


def _set(items: list[tuple[Any, Any]]) -> Ranges:
    """Of what stands between brackets."""
    negated = items[0][0] is names.NEGATE
    parts = [_part(kind, value, wide=negated) for kind, value in items if kind is not names.NEGATE]
    return characters.without(characters.ALL, characters.union(*parts)) if negated else characters.union(*parts)


def _part(kind: Any, value: Any, *, wide: bool) -> Ranges:
    if kind is names.LITERAL:
        return _code(value)
    if kind is names.RANGE:
        return characters.without((value,), ((0xD800, 0xDFFF),))
    return _category(value, wide=wide)


def _category(name: Any, *, wide: bool) -> Ranges:
    """Not more than Python's, or, where it is taken away, not less."""
    if name in _OPPOSITES:
        return characters.without(characters.ALL, _category(_OPPOSITES[name], wide=not wide))
    narrow, whole = _CATEGORIES[name]
    return whole() if wide or narrow is None else narrow


def _code(code: int) -> Ranges:
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError("half a surrogate pair is not supported")
    return ((code, code),)


def _class(ranges: Ranges) -> str:
    return "[" + "".join(_written(low) + (f"-{_written(high)}" if high > low else "") for low, high in ranges) + "]"


def _written(code: int) -> str:
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"
