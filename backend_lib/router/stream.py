"""A live request in the router: what its client has been sent, and what its slot still waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from backend_lib.arena import Published, SlotTable
from backend_lib.request import FinishReason, GenerationRequest
from backend_lib.router.finished import Finished, Times
from backend_lib.router.reply import ErrorKind, Reply, Sender, Verdict
from backend_lib.router.text import TextStream

_ENDED_BY_TOKEN = (FinishReason.EOS, FinishReason.STOP_TOKEN)
# Ends that the worker finds and the client is told as an error.
_ERRORS = {FinishReason.ERROR: ErrorKind.INTERNAL, FinishReason.INVALID: ErrorKind.INVALID_ARG}


class Stream:
    """One sequence's way back to its client.

    Who touches what: the reply pool gives a stream to one thread at a time, and that thread alone sends and decodes.
    `verdict` is set once, by whoever comes first (under `lock`). The group owns `posted`, `last_command` and
    `released`.
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
        self._consumed = 0
        self._pending = ""
        self._pending_tokens = 0

    def begin(self, text: TextStream, num_input_tokens: int) -> None:
        """What the stream needs before its first token."""
        self._text = text
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
            self.fail(_ERRORS[finish], slots.headers["error"][self.slot].decode(errors="replace"))
        elif finish:
            self._pending += self._text.finish()
            self._send(finish, slots)
        elif self._ready_to_send():
            self._send(FinishReason.NONE, slots)

    def _consume(self, slots: SlotTable, published: Published) -> FinishReason:
        """Decode the new tokens. The token that ended the sequence counts, but is not text."""
        assert self._text is not None
        token_ids = slots.output_ids(self.slot)[self._consumed : published.output_len].tolist()
        if token_ids and not self._consumed:
            self._keep_start(slots)
        self._consumed = published.output_len
        silent = 1 if token_ids and published.finish in _ENDED_BY_TOKEN else 0
        delta = self._text.push(token_ids[: len(token_ids) - silent])
        self._pending += delta.text
        self._count(delta.num_tokens)
        if delta.stopped:
            return FinishReason.STOP_STRING
        self._count(silent)
        return published.finish

    def _keep_start(self, slots: SlotTable) -> None:
        """What the worker writes anew when it gives the sequence a row again."""
        header = slots.headers[self.slot]
        self.first_started = self.first_started or int(header["first_scheduled_ns"])
        self.cached_tokens = int(header["cached_tokens"])

    def _count(self, num_tokens: int) -> None:
        self._pending_tokens += num_tokens
        self.num_output_tokens += num_tokens

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
        return output.stream and bool(self._pending) and self._pending_tokens >= output.stream_interval

    def _send(self, finish: FinishReason, slots: SlotTable) -> None:
        cached = int(slots.headers["cached_tokens"][self.slot])
        reply = Reply(self._pending, self._pending_tokens, finish, self.num_input_tokens, self.request.output, cached)
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
