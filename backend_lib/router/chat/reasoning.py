"""What a model thinks before it answers, told from the answer: `<think>`…`</think>`."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

BEGIN, END = "<think>", "</think>"


class Split(NamedTuple):
    reasoning: str
    content: str


class _State(Enum):
    START = "nothing but blanks yet"
    THINKING = "inside"
    AFTER = "nothing but line ends since"
    CONTENT = "the answer"


class ReasoningParser:
    """Splits a reply, the same however it is cut into pieces.

    Reasoning stands at the beginning or nowhere; a later `<think>` is content. The line ends around it, which templates
    write again, are dropped. A reply that ends before `</think>` is all reasoning.

    Args:
        is_open: the prompt ends with `<think>`, so the reply begins inside.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._is_open = is_open
        self._state = _State.START
        self._held = ""
        self._has_reasoning = False

    def push(self, text: str) -> Split:
        if self._state is _State.CONTENT:
            return Split("", text)
        self._held += text
        if self._state is _State.START:
            self._start()
        reasoning = self._think() if self._state is _State.THINKING else ""
        return Split(reasoning, self._answer())

    def finish(self) -> Split:
        """What was held back. The reply has ended."""
        held, self._held = self._held, ""
        if self._state is _State.THINKING:
            return Split(self._stripped(held), "")
        if self._state is _State.START and self._is_open:
            return Split(held.strip("\n"), "")
        return Split("", held if self._state is _State.START else "")

    def _start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(BEGIN):  # where the prompt has it already, some models repeat it
            self._held = text[len(BEGIN) :]
            self._state = _State.THINKING
        elif not BEGIN.startswith(text):
            self._state = _State.THINKING if self._is_open else _State.CONTENT

    def _think(self) -> str:
        end = self._held.find(END)
        if end >= 0:
            reasoning = self._stripped(self._held[:end])
            self._held = self._held[end + len(END) :]
            self._state = _State.AFTER
            return reasoning
        settled = len(self._held[: len(self._held) - self._open_end()].rstrip("\n"))
        reasoning, self._held = self._stripped(self._held[:settled]), self._held[settled:]
        return reasoning

    def _stripped(self, text: str) -> str:
        text = text.rstrip("\n") if self._has_reasoning else text.strip("\n")
        self._has_reasoning = self._has_reasoning or bool(text)
        return text

    def _open_end(self) -> int:
        """How many characters at the end may be the beginning of the end marker."""
        return next((size for size in range(len(END) - 1, 0, -1) if self._held.endswith(END[:size])), 0)

    def _answer(self) -> str:
        if self._state is _State.AFTER:
            self._held = self._held.lstrip("\n")
            self._state = _State.CONTENT if self._held else _State.AFTER
        if self._state is not _State.CONTENT:
            return ""
        content, self._held = self._held, ""
        return content


def begins_inside(prompt: str) -> bool:
    """Whether the template has opened the reasoning already."""
    return prompt.rstrip().endswith(BEGIN)
