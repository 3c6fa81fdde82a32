"""What the parsers of tool calls have in common: text that arrives in pieces, and a parser that waits inside it."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import ClassVar

from backend_lib.router.chat.calls import Call, Piece
from backend_lib.router.chat.json_scanner import JsonScanner

# A step of parsing: it yields to wait for more text, and returns what it found.
Flag = Generator[None, None, bool]
Word = Generator[None, None, str]
Step = Generator[None, None, None]

_SPACE = re.compile(r"\s*")
_MAX_SPACE = 64  # blanks before a call that are counted to it; a reply of nothing but blanks must not pile up


class CallReader:
    """Splits a reply into content and calls, the same however the reply is cut into pieces.

    A format has its `marker`, which begins a call wherever it stands, and `_call`, which reads one. What begins like a
    call and is none becomes content as soon as that shows, up to the character that shows it: each character is read
    once, and nothing is lost.
    """

    marker: ClassVar[str]
    markers: ClassVar[tuple[str, ...]]  # all that must be in the text for calls to be found

    def __init__(self) -> None:
        self._text = ""
        self._begin = 0  # of what no piece has yet
        self._at = 0
        self._ended = False
        self._after_call = False
        self._pieces: list[Piece] = []
        self._run = self._reply()
        next(self._run)

    def push(self, text: str) -> list[Piece]:
        """Pieces that this text completes."""
        self._text = self._text[self._begin :] + text
        self._at = max(0, self._at - self._begin)
        self._begin = 0
        return self._go_on()

    def finish(self) -> list[Piece]:
        """What was held back. The reply has ended."""
        self._ended = True
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        next(self._run, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    def _reply(self) -> Step:
        yield from self._opening()
        while (yield from self._to_marker()):
            if not (yield from self._call()):
                self._give_content()
        self._give_end()

    def _opening(self) -> Step:
        """Calls that stand at the beginning without a marker."""
        yield from ()

    def _call(self) -> Flag:
        """Read a call, after the marker, and give it; or return false where it is seen to be none."""
        raise NotImplementedError

    def _to_marker(self) -> Flag:
        """Give content up to the next marker and read that; false at the end of the reply."""
        while (found := self._text.find(self.marker, self._begin)) < 0:
            self._give_content(self._space_before(len(self._text) - self._open_marker()))
            if self._ended:
                return False
            yield
        self._give_content(self._space_before(found))
        self._at = found + len(self.marker)
        return True

    def _open_marker(self) -> int:
        """How many characters at the end may be the beginning of a marker."""
        sizes = range(len(self.marker) - 1, 0, -1)
        return next((size for size in sizes if self._text.endswith(self.marker[:size])), 0)

    def _space_before(self, end: int) -> int:
        start = max(self._begin, end - _MAX_SPACE)
        return start + len(self._text[start:end].rstrip())

    def _give_content(self, end: int | None = None) -> None:
        end = self._at if end is None else end
        if end > self._begin:
            raw = self._text[self._begin : end]
            self._pieces.append(Piece(raw, content=raw))
            self._begin = end
            self._after_call = False

    def _give_calls(self, *calls: Call) -> None:
        self._pieces.append(Piece(self._text[self._begin : self._at], calls=calls))
        self._begin = self._at
        self._after_call = True

    def _give_end(self) -> None:
        """Blanks that nothing follows are content, unless they follow a call."""
        self._at = len(self._text)
        rest = self._text[self._begin :]
        if self._after_call and rest.isspace():
            self._pieces.append(Piece(rest))
        else:
            self._give_content()

    def _next(self) -> Word:
        """The next character, not read; "" at the end of the reply."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def _spaces(self) -> Step:
        while (yield from self._next()).isspace():
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at

    def _literal(self, text: str) -> Flag:
        """Read this text, or nothing."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text:
                self._at += len(text)
                return True
            if self._ended or not text.startswith(there):
                return False
            yield

    def _word(self, letters: re.Pattern[str]) -> Word:
        """Read as many letters as there are; `letters` matches none or more."""
        start = self._at - self._begin
        while (yield from self._next()):
            match = letters.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                break
        return self._text[self._begin + start : self._at]

    def _closing(self, text: str) -> Flag:
        """Read this text, or as much of it as stands at the end of the reply."""
        if (yield from self._literal(text)):
            return True
        if not self._ended or not text.startswith(self._text[self._at :]):
            return False
        self._at = len(self._text)
        return True

    def _json(self, opening: str) -> Word:
        """Read a JSON value that begins so and return its text, or "" after reading as far as it could be one."""
        if (yield from self._next()) != opening:
            return ""
        start, scanner = self._at - self._begin, JsonScanner()
        while True:
            self._at = scanner.read(self._text, self._at)
            if scanner.done:
                return self._text[self._begin + start : self._at]
            if scanner.failed or self._ended:
                return ""
            yield
