"""One sequence's reply in a conversation, taken apart for those who want reasoning and calls of tools by themselves."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from backend_lib.router.chat import Delta, ReplyParser


class ChatNews(NamedTuple):
    """What a response says beside its text: reasoning and calls since the last one, the calls as a JSON list."""

    reasoning: str = ""
    tool_calls: str = "[]"


class Conversation:
    """Gathers what the next response says. Used by one thread at a time."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._reasoning = ""
        self._calls: list[dict[str, Any]] = []

    @property
    def has_calls(self) -> bool:
        return self._parser.has_calls

    @property
    def has_news(self) -> bool:
        return bool(self._reasoning or self._calls)

    def push(self, text: str) -> str:
        """The content in a piece of text."""
        return self._keep(self._parser.push(text))

    def finish(self) -> str:
        """The content that was held back, once the text has ended."""
        return self._keep(self._parser.finish())

    def take(self) -> ChatNews:
        """Once: the next response has what comes from now on."""
        news = ChatNews(self._reasoning, json.dumps(self._calls))
        self._reasoning, self._calls = "", []
        return news

    def _keep(self, delta: Delta) -> str:
        self._reasoning += delta.reasoning
        self._calls += delta.tool_calls
        return delta.content
