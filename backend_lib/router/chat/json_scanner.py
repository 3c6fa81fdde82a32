"""Where a JSON object or array ends in text that arrives in pieces; and, as soon as it shows, that it is none."""

from __future__ import annotations

import re

_SPACE = re.compile(r"[ \t\n\r]*")
_TEXT = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_MAX_NUMBER = 64  # characters; longer than any number that means something
_MAX_DEPTH = 64
_CLOSES = {"{": "}", "[": "]"}


class JsonScanner:
    """Reads each character once. Control characters inside strings are let through: models write them.

    `done`: the value is complete. `failed`: what was read cannot begin any value.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []
        self._allowed = "{["  # first characters of what may come next; v is any value
        self._in_string = False
        self._is_key = False
        self._escaped = False
        self._word = ""

    def read(self, text: str, start: int) -> int:
        """How far the value goes: to its end, to what makes it none, or to the end of the text."""
        at = start
        while at < len(text) and not self.done and not self.failed:
            at = self._read_string(text, at) if self._in_string else self._read_structure(text, at)
        return at

    def _read_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        match = _TEXT.match(text, at)
        at = match.end() if match else at
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self._allowed = ":" if self._is_key else self._after_value()
        return at + 1

    def _read_structure(self, text: str, at: int) -> int:
        match = _WORD.match(text, at)
        end = match.end() if match else at
        if end > at or self._word:
            return self._read_word(text, at, end)
        space = _SPACE.match(text, at)
        if space and space.end() > at:
            return space.end()
        return self._read_mark(text[at], at)

    def _read_word(self, text: str, at: int, end: int) -> int:
        """A number or a literal, which only what comes after it ends."""
        self._word += text[at:end]
        complete = end < len(text)
        if "v" not in self._allowed or not _may_be_word(self._word, complete):
            self.failed = True
            return at
        if complete:
            self._word, self._allowed = "", self._after_value()
        return end

    def _read_mark(self, mark: str, at: int) -> int:
        if mark not in self._allowed and not ("v" in self._allowed and mark in '"{['):
            self.failed = True
            return at
        if mark in "{[":
            self._open.append(mark)
            self.failed = len(self._open) > _MAX_DEPTH
            self._allowed = '"}' if mark == "{" else "v]"
        elif mark in "}]":
            self._open.pop()
            self.done = not self._open
            self._allowed = self._after_value()
        elif mark == '"':
            self._in_string, self._is_key = True, "v" not in self._allowed
        elif mark == ":":
            self._allowed = "v"
        else:
            self._allowed = '"' if self._open[-1] == "{" else "v"
        return at + 1

    def _after_value(self) -> str:
        return "," + _CLOSES[self._open[-1]] if self._open else ""


def _may_be_word(word: str, complete: bool) -> bool:
    if complete:
        return word in _WORDS or (len(word) <= _MAX_NUMBER and _NUMBER.fullmatch(word) is not None)
    if word[0] in "-0123456789":
        return len(word) <= _MAX_NUMBER
    return any(each.startswith(word) for each in _WORDS)
