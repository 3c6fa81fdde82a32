"""A live request in the router: what its client has been sent, and what its slot still waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from backend_lib.arena import Published, SlotTable
from backend_lib.request import FinishReason, GenerationRequest
from backend_lib.router.conversation import Conversation
from backend_lib.router.finished import Finished, Times
from backend_lib.router.reply import ErrorKind, Reply, Sender, Verdict
from backend_lib.router.text import TextStream
from backend_lib.router.token_outputs import TokenNews, TokenOutputs

_ENDED_BY_TOKEN = (FinishReason.EOS, FinishReason.STOP_TOKEN)
# Ends that the worker finds and the client is told as an error.
_ERRORS = {FinishReason.ERROR: ErrorKind.INTERNAL, FinishReason.INVALID: ErrorKind.INVALID_ARG}


class Stream:
    """One sequence's way back to its client.

    Who touches what: the reply pool gives a stream to one thread at a time, and that thread alone sends and decodes.
    `verdict` is set once, by whoever comes first (under `lock`). What a group owns is guarded by the lock of the group
    that `group` names, and `group` itself by the lock of the one that it leaves.
    """

    def __init__(
        self, request: GenerationRequest, sender: Sender, slot: int, generation: int, deadline: float | None = None
    ) -> None:
        self.request = request
        self.sender = sender
        self.slot = slot
        self.generation = generation
        self.deadline = deadline  # in time.monotonic()
        self.num_input_tokens = 0
        self.extent = -1  # where the slot's extent begins
        # Owned by the group.
        self.group = 0
        self.arrival = 0  # its place among all that have come
        self.posted = False  # the present worker has been given it
        self.released = False
        self.last_command = 0
        self.deaths = 0  # of workers that had begun it, in a row and without a token
        self.convicted = False  # the last of them had nothing else to compute
        self.seen_at_start = 0  # output_len when the present worker was given the sequence
        self.started_before = 0  # and when a worker had last begun it
        self.first_started = 0  # when the first worker had begun it, once it or its first token has been seen
        # Shared.
        self.lock = threading.Lock()
        self.verdict: Verdict | None = None
        self.answered = False
        self.retired = False
        # Owned by the reply thread that holds the stream.
        self.cached_tokens = 0  # of the prompt, found when it was first computed
        self.num_output_tokens = 0  # those that count
        self.finished: Finished | None = None  # when it has ended, for whoever writes that down
        self._text: TextStream | None = None
        self._tokens: TokenOutputs | None = None
        self._conversation: Conversation | None = None
        self._consumed = 0
        self._pending = ""
        self._pending_tokens = 0

    def begin(
        self,
        text: TextStream,
        num_input_tokens: int,
        *,
        tokens: TokenOutputs | None = None,
        conversation: Conversation | None = None,
    ) -> None:
        """What the stream needs before its first token.

        Args:
            tokens: where the client wants to know of single ones.
            conversation: where it wants the text taken apart.
        """
        self._text = text
        self._tokens = tokens
        self._conversation = conversation
        self.num_input_tokens = num_input_tokens
        self._pending = self.request.text if self.request.output.echo_prompt else ""

    def decide(self, verdict: Verdict) -> bool:
        """Set the router's verdict. False when the stream has been answered or has one already."""
        with self.lock:
            if self.verdict or self.answered:
                return False
            self.verdict = verdict
            return True

    def may_retire(self) -> bool:
        """True once: when the client has its last response and no worker holds the sequence."""
        with self.lock:
            if self.retired or not (self.answered and self.released):
                return False
            self.retired = True
            return True

    def advance(self, slots: SlotTable, on_stop: Callable[[Stream], None]) -> None:
        """Send what has been published since the last call; `on_stop` when a stop string ends the sequence.

        Called by one thread at a time, until `answered`.
        """
        if self.answered:
            return
        if self.verdict and self.verdict.error:
            self._finish(slots, self.verdict.finish, self.verdict.error)
            self.fail(self.verdict.error, self.verdict.words)
            return
        published = slots.published(self.slot, self.generation)
        if published is None or self._text is None:
            return
        finish = self._consume(slots, published)
        if finish is FinishReason.STOP_STRING and self.decide(Verdict(finish)):
            on_stop(self)
        if finish:
            self._finish(slots, finish, _ERRORS.get(finish))
        if finish in _ERRORS:
            self.fail(_ERRORS[finish], self._named(finish, slots.headers["error"][self.slot].decode(errors="replace")))
        elif finish:
            self._pending += self._last_text(self._text)
            self._send(finish, slots)
        elif self._ready_to_send():
            self._send(FinishReason.NONE, slots)

    def _consume(self, slots: SlotTable, published: Published) -> FinishReason:
        """Decode the new tokens. The token that ended the sequence counts, but is not text unless it is asked for."""
        assert self._text is not None
        token_ids = slots.output_ids(self.slot)[self._consumed : published.output_len].tolist()
        if token_ids and not self._consumed:
            self._keep_start(slots)
        silent = int(bool(token_ids) and self._is_silent(published.finish))
        delta = self._text.push(token_ids[: len(token_ids) - silent])
        self._pending += self._conversation.push(delta.text) if self._conversation else delta.text
        self._count(slots, token_ids[: delta.num_tokens + (0 if delta.stopped else silent)])
        self._consumed = published.output_len
        return FinishReason.STOP_STRING if delta.stopped else published.finish

    def _named(self, finish: FinishReason, words: str) -> str:
        """The worker knows a grammar, and not where it stood; of a request's fields it judges no other."""
        grammar = self.request.sampling.grammar
        return f"'{grammar.field}' cannot be kept to: {words}" if grammar and finish is FinishReason.INVALID else words

    def _last_text(self, text: TextStream) -> str:
        """What was held back. The sequence has ended."""
        rest = text.finish()
        return self._conversation.push(rest) + self._conversation.finish() if self._conversation else rest

    def _is_silent(self, finish: FinishReason) -> bool:
        """Whether the last token is no text."""
        return finish in _ENDED_BY_TOKEN and not self.request.sampling.include_stop_str_in_output

    def _keep_start(self, slots: SlotTable) -> None:
        """What the worker writes anew when it gives the sequence a row again."""
        header = slots.headers[self.slot]
        self.first_started = self.first_started or int(header["first_scheduled_ns"])
        self.cached_tokens = int(header["cached_tokens"])
        if self._tokens:
            self._tokens.add_prompt(slots.prompt_logprobs(self.slot))

    def _count(self, slots: SlotTable, token_ids: list[int]) -> None:
        """The tokens that count begin where the last ones ended."""
        self._pending_tokens += len(token_ids)
        self.num_output_tokens += len(token_ids)
        if self._tokens and token_ids:
            rows = slots.logprobs(self.slot)
            self._tokens.add(token_ids, None if rows is None else rows[self._consumed :])

    def _finish(self, slots: SlotTable, finish: FinishReason, error: ErrorKind | None) -> None:
        """Keep what the slot says: once `answered`, the slot may be another's."""
        header, now = slots.headers[self.slot], time.time_ns()
        times = Times(
            arrival=int(header["arrival_ns"]),
            scheduled=self.first_started or int(header["first_scheduled_ns"]),
            first_token=int(header["first_token_ns"]),
            last_token=int(header["last_token_ns"]) or now,  # the worker stamps the ends that it finds itself
            end=now,
        )
        self.finished = Finished(
            self.request.request_id, finish, error, self.num_input_tokens, self.cached_tokens, self.num_output_tokens,
            times,
        )  # fmt: skip

    def _ready_to_send(self) -> bool:
        output = self.request.output
        has_news = bool(self._pending) or (self._conversation is not None and self._conversation.has_news)
        return output.stream and has_news and self._pending_tokens >= output.stream_interval

    def _send(self, finish: FinishReason, slots: SlotTable) -> None:
        cached = int(slots.headers["cached_tokens"][self.slot])
        tokens = self._tokens.take() if self._tokens else TokenNews()
        reply = Reply(
            self._pending, self._pending_tokens, finish, self.num_input_tokens, self.request.output, cached, tokens
        )
        if self._conversation:
            reply = reply._replace(chat=self._conversation.take(), has_calls=self._conversation.has_calls)
        self._pending, self._pending_tokens = "", 0
        if finish:
            self.answered = True
        self.sender.send(reply)

    def fail(self, kind: ErrorKind, message: str) -> None:
        """End with an error, unless the client has its last response already."""
        if self.answered:
            return
        self.answered = True
        self.sender.fail(kind, message)
