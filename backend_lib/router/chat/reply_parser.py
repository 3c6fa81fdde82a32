"""A reply taken apart as it comes: reasoning first, then content and calls of tools."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from backend_lib.router.chat.calls import Call, Piece
from backend_lib.router.chat.reasoning import BEGIN, END, ReasoningParser, begins_inside
from backend_lib.router.chat.tool_calls import TOOL_PARSERS, detect_tool_parser

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from backend_lib.router.chat.call_reader import CallReader
    from backend_lib.router.chat.template import ChatTemplate

TOOL_PARSER_NAMES = ("auto", "none", *TOOL_PARSERS)
REASONING_PARSER_NAMES = ("auto", "none", "think")

_MISTRAL_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Delta(NamedTuple):
    """What some text adds. `tool_calls` are finished ones, in OpenAI's shape."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplyFormat:
    """How a model writes its replies: names of TOOL_PARSER_NAMES and REASONING_PARSER_NAMES, `auto` resolved."""

    tool_parser: str = "none"
    reasoning_parser: str = "none"

    @classmethod
    def of(cls, template: ChatTemplate, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ReplyFormat:
        """`auto` is what the template itself speaks of."""
        text = f"{template.source or ''}\n{template.tool_source or ''}"
        if tool_parser == "auto":
            tool_parser = detect_tool_parser(text)
        if reasoning_parser == "auto":
            reasoning_parser = "think" if END in text else "none"
        return cls(tool_parser=tool_parser, reasoning_parser=reasoning_parser)

    def markers(self, *, tools: bool = True, reasoning: bool = True) -> tuple[str, ...]:
        """What must stand in the text for the parsers to see it."""
        calls = TOOL_PARSERS[self.tool_parser].markers if tools and self.tool_parser != "none" else ()
        return calls + ((BEGIN, END) if reasoning and self.reasoning_parser != "none" else ())

    def needs_special_tokens(self, tokenizer: Tokenizer, *, tools: bool = True, reasoning: bool = True) -> bool:
        """Whether some marker is a special token of this tokenizer, which decoding leaves out of the text.

        Then decode with `skip_special_tokens` false where a parser is on, and leave out what ends the sequence (its
        end-of-sequence and stop tokens): otherwise that would be content.
        """
        ids = [tokenizer.token_to_id(marker) for marker in self.markers(tools=tools, reasoning=reasoning)]
        return any(not tokenizer.decode([token_id]) for token_id in ids if token_id is not None)

    def parser(
        self, *, prompt: str, seed: int = 0, sequence: int = 0, tools: bool = True, reasoning: bool = True
    ) -> ReplyParser:
        """A parser for one sequence's text.

        Args:
            prompt: the rendered one; it says whether reasoning has begun, and takes part in the ids of calls, so that
                two turns of a conversation with the same seed have different ones.
            sequence: its index among the request's.
            tools, reasoning: whether this request wants them parsed.
        """
        calls = TOOL_PARSERS[self.tool_parser]() if tools and self.tool_parser != "none" else None
        thoughts = ReasoningParser(begins_inside(prompt)) if reasoning and self.reasoning_parser != "none" else None
        return ReplyParser(calls, thoughts, _CallIds(prompt, seed, sequence, short=self.tool_parser == "mistral"))


class ReplyParser:
    """Takes one sequence's text apart. Used by one thread at a time.

    `push` and `finish` may be called with any cut of the text; what they give in all does not depend on it. Where
    neither reasoning nor tools are parsed the text goes through as it is.
    """

    def __init__(self, calls: CallReader | None, thoughts: ReasoningParser | None, ids: _CallIds) -> None:
        self._calls = calls
        self._thoughts = thoughts
        self._ids = ids

    @property
    def has_calls(self) -> bool:
        """Whether a call has been found; OpenAI's finish reason is then `tool_calls` where it would be `stop`."""
        return self._ids.count > 0

    def push(self, text: str) -> Delta:
        if self._thoughts is None and self._calls is None:
            return Delta(text)
        reasoning, content = self._thoughts.push(text) if self._thoughts else ("", text)
        return self._delta(reasoning, content)

    def finish(self) -> Delta:
        """What was held back. The text has ended."""
        reasoning, content = self._thoughts.finish() if self._thoughts else ("", "")
        first = self._delta(reasoning, content)
        last = self._of_pieces("", self._calls.finish()) if self._calls else Delta()
        return Delta(first.content + last.content, first.reasoning, first.tool_calls + last.tool_calls)

    def _delta(self, reasoning: str, content: str) -> Delta:
        if self._calls is None:
            return Delta(content, reasoning)
        return self._of_pieces(reasoning, self._calls.push(content))

    def _of_pieces(self, reasoning: str, pieces: list[Piece]) -> Delta:
        calls = tuple(self._shaped(call) for piece in pieces for call in piece.calls)
        return Delta("".join(piece.content for piece in pieces), reasoning, calls)

    def _shaped(self, call: Call) -> dict[str, Any]:
        return {
            "id": self._ids.next(call),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


class _CallIds:
    """Ids that a repeated request repeats, and that no other request is likely to have."""

    def __init__(self, prompt: str, seed: int, sequence: int, *, short: bool) -> None:
        self.count = 0
        self._short = short
        self._key = f"{seed} {sequence} {prompt}"

    def next(self, call: Call) -> str:
        self.count += 1
        digest = hashlib.sha256(self._prefix + str(self.count).encode()).digest()
        if not self._short:
            return f"call_{digest.hex()[:24]}"
        # Mistral's templates refuse any other id than nine letters or digits.
        return call.id or "".join(_MISTRAL_LETTERS[byte % len(_MISTRAL_LETTERS)] for byte in digest[:9])

    @cached_property
    def _prefix(self) -> bytes:
        """Not before the first call: most replies have none, and a prompt may be long."""
        return hashlib.sha256(self._key.encode()).digest()
