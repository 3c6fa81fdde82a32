"""What the router says to a client, and the one way to say it."""

from __future__ import annotations

import time
from enum import Enum
from typing import NamedTuple, Protocol

from backend_lib.request import FinishReason, GenerationRequest, OutputOptions
from backend_lib.router.conversation import ChatNews
from backend_lib.router.token_outputs import TokenNews


class ErrorKind(Enum):
    """The kinds of error a client can tell apart; Triton has a status code for each."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class Reply(NamedTuple):
    """One response: the text and tokens since the last one. `finish` is NONE unless it is the last."""

    text: str
    num_tokens: int
    finish: FinishReason
    num_input_tokens: int
    output: OutputOptions
    num_cached_tokens: int = 0
    tokens: TokenNews = TokenNews()
    chat: ChatNews = ChatNews()
    has_calls: bool = False

    @property
    def reason(self) -> str:
        """Why it has ended, in the client's words. As OpenAI has it, a reply that calls tools stops for those."""
        return "tool_calls" if self.has_calls and self.finish.text == "stop" else self.finish.text


class Verdict(NamedTuple):
    """The router's own end of a sequence. `error` None means that the client is sent a normal last response."""

    finish: FinishReason
    error: ErrorKind | None = None
    words: str = ""


UNLOADING = Verdict(FinishReason.CANCELLED, ErrorKind.UNAVAILABLE, "the model is being unloaded")


class Sender(Protocol):
    """One that waits for replies. After the last one no other may be sent."""

    def send(self, reply: Reply) -> None:
        """Send a reply; the last one says so itself."""

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Send an error as the last reply."""

    def is_cancelled(self) -> bool:
        """Whether the client has gone or called it off. May be slow."""


class Client(Sender, Protocol):
    """The sender of a whole request."""

    def send_siblings(self, replies: list[Reply], news: list[int], *, final: bool) -> None:
        """Send a response for n sequences: a reply of each, and the indices of those that have something new."""


def verdict_of_client(request: GenerationRequest, deadline: float | None, sender: Sender) -> Verdict | None:
    """Whether the client wants no more of a request: its deadline (`time.monotonic()`) has passed, or it has gone."""
    if deadline is not None and time.monotonic() > deadline:
        words = f"the request's timeout of {request.timeout_us} us has passed"
        return Verdict(FinishReason.DEADLINE, ErrorKind.UNAVAILABLE, words)
    if sender.is_cancelled():
        return Verdict(FinishReason.CANCELLED, ErrorKind.CANCELLED, "the request was cancelled")
    return None
