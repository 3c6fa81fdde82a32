"""The n sequences of one request, which answer one client together."""

from __future__ import annotations

import threading

from backend_lib.request import FinishReason, GenerationRequest
from backend_lib.router.conversation import ChatNews
from backend_lib.router.reply import Client, ErrorKind, Reply
from backend_lib.router.token_outputs import TokenNews


class Siblings:
    """Joins what n streams have to say into responses with one element per sequence.

    When streaming, each sequence's news goes out as it comes, the others' elements being empty; otherwise there is one
    response when the last has ended. The first error is the request's. Sends exclude each other, so the final response
    is the last.
    """

    def __init__(self, sender: Client, request: GenerationRequest) -> None:
        self._sender = sender
        self._stream = request.output.stream
        self._lock = threading.Lock()
        nothing = Reply("", 0, FinishReason.NONE, 0, request.output)
        self._replies = [nothing] * request.sampling.n
        self._over = False

    def voice(self, sequence_index: int) -> Voice:
        """The sender of one of the sequences."""
        return Voice(self, sequence_index)

    def send(self, sequence_index: int, reply: Reply) -> None:
        with self._lock:
            if self._over:
                return
            self._replies[sequence_index] = reply
            final = all(each.finish for each in self._replies)
            if not (self._stream or final):
                return
            self._over = final
            news = [sequence_index] if self._stream else list(range(len(self._replies)))
            replies = [each if place in news else _quiet(each, reply) for place, each in enumerate(self._replies)]
            self._sender.send_siblings(replies, news, final=final)

    def fail(self, kind: ErrorKind, message: str) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._sender.fail(kind, message)

    def is_cancelled(self) -> bool:
        """Also once the request is over: whatever still runs of it is for nobody."""
        return self._over or self._sender.is_cancelled()


class Voice:
    """A `Sender` for one of the sequences."""

    def __init__(self, siblings: Siblings, sequence_index: int) -> None:
        self._siblings = siblings
        self._sequence_index = sequence_index

    def send(self, reply: Reply) -> None:
        self._siblings.send(self._sequence_index, reply)

    def fail(self, kind: ErrorKind, message: str) -> None:
        self._siblings.fail(kind, message)

    def is_cancelled(self) -> bool:
        return self._siblings.is_cancelled()


def _quiet(last: Reply, news: Reply) -> Reply:
    """A sequence that has nothing new to say: it has not ended, or it has and said so."""
    tokens = TokenNews(cumulative_logprob=last.tokens.cumulative_logprob)
    return news._replace(
        text="", num_tokens=0, finish=last.finish, tokens=tokens, chat=ChatNews(), has_calls=last.has_calls
    )
