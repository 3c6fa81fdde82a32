"""The router: takes requests, gives them to the workers through the arena, and brings back what they produce."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from backend_lib.arena import Arena, SlotRef
from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.request import FinishReason, OutputOptions
from backend_lib.router import finished
from backend_lib.router.callers import Callers
from backend_lib.router.finished import Finished, Times
from backend_lib.router.group import Group
from backend_lib.router.groups import Groups
from backend_lib.router.intake import Inbound, Intake, NoRoom, Over
from backend_lib.router.intake_queue import MAX_BYTES, IntakeQueue
from backend_lib.router.metrics import FINISHED, GENERATION_TOKENS, PREFIX_HITS, PROMPT_TOKENS, RESTARTS, Metrics
from backend_lib.router.metrics_pusher import WorkerCounts
from backend_lib.router.refusals import RequestError
from backend_lib.router.reply import UNLOADING, ErrorKind, Reply, Verdict
from backend_lib.router.reply_pool import ReplyPool
from backend_lib.router.seats import seat_workers
from backend_lib.router.sizes import arena_spec, max_model_len
from backend_lib.router.slot_pool import SlotPool
from backend_lib.router.sources import is_cancellation
from backend_lib.router.stream import Stream
from backend_lib.router.watcher import Watcher
from backend_lib.router.workers import End

log = logging.getLogger("tandem")

REPLY_THREADS = 4
MAX_FAILED_STARTS = 5  # in a row, over some 15 seconds; then those who wait for the worker are told


class Router:
    """Owns the arena and everything in the router's process.

    A request's way: `submit` takes a slot → an intake thread parses, tokenises and writes the slot → the group posts
    it → the doorbell thread marks what the worker has touched → a reply thread sends. A slot is retired when its
    client has the last response and the worker has released it.
    """

    def __init__(
        self, settings: Settings, *, is_serving: Callable[[], bool] = lambda: True, server: int | None = None
    ) -> None:
        """Load the tokenizer, make the arena and start the workers.

        `is_serving`: whether the model is wanted; once it is not, streams are ended after the drain time. `server`: a
        pidfd of the process whose end is this one's.

        Raises:
            ValueError, OSError, RuntimeError: the model cannot be served, in words for Triton's log.
        """
        self._checkpoint = open_checkpoint(settings.model)
        self._max_model_len = max_model_len(settings, self._checkpoint)
        seating = seat_workers(settings, self._checkpoint)
        self._settings = settings = seating.settings
        self._arena = Arena.create(
            spec := arena_spec(settings, self._max_model_len),
            {"settings": settings.as_dict(), "max_model_len": self._max_model_len},
        )
        self._pool = SlotPool(spec.num_slots)
        self._groups = Groups(
            self._arena, settings, seating.seats, server=server,
            on_released=self._maybe_retire, on_down=self._workers_died,
        )  # fmt: skip
        self._dispatch = self._groups.dispatch
        self._intake = Intake(settings, self._checkpoint, self._arena, self._pool, max_len=self._max_model_len)
        self._streams: dict[int, Stream] = {}  # by slot; from the slot's writing to its retirement
        self._callers = Callers()
        self._closing = False
        self._triton_asks = False
        self.metrics = Metrics()
        self.worker_counts = WorkerCounts(self.metrics, self._groups.looks)
        if seating.words:
            log.info("%s", seating.words)
        self._intake.max_len = min(self._max_model_len, self._groups.load())
        self._replies = ReplyPool(REPLY_THREADS, self._answer)
        self._watcher = Watcher(
            self._end,
            on_drained=self._groups.close,  # the workers' memory is free, however long Triton keeps the router
            is_serving=lambda: self._is_wanted(is_serving),
            drain_seconds=settings.drain_seconds,
        )
        self._intake_queue = IntakeQueue(self._take)
        self._doorbell = threading.Thread(target=self._drain_forever, name="tandem-doorbell", daemon=True)
        self._doorbell.start()

    def submit(self, inbound: Inbound) -> None:
        """Take a request and return at once; everything else, errors included, goes through its sender."""
        if is_cancellation(inbound.tensors, inbound.parameters, self._settings.contract):
            self._cancel(inbound)
            return
        if inbound.request_id:
            inbound = inbound._replace(sender=self._callers.enter(inbound.request_id, inbound.sender))
        taken = None if self._closing else self._pool.acquire()
        if taken is None:
            inbound.sender.fail(ErrorKind.UNAVAILABLE, self._refusal())
            reason = "unloading" if self._closing else "queue_full"
            finished.refused(self.metrics, inbound.request_id, reason, ErrorKind.UNAVAILABLE)
            return
        if not self._intake_queue.put(inbound._replace(arrived=time.monotonic()), taken[0]):
            words = f"the requests that wait to be read have more than {MAX_BYTES >> 20} MiB"
            self._refuse(inbound, taken[0], ErrorKind.UNAVAILABLE, "queue_full", words)

    def _cancel(self, inbound: Inbound) -> None:
        """An order to end every request of this one's id, which the watcher does at its next look.

        It takes no slot, for it must come through when there are none.
        """
        if not inbound.request_id:
            inbound.sender.fail(
                ErrorKind.INVALID_ARG, "the request id is missing; allowed with 'cancel' is that of the requests to end"
            )
            finished.refused(self.metrics, "", "invalid", ErrorKind.INVALID_ARG)
            return
        self._callers.cancel(inbound.request_id)
        inbound.sender.send(Reply("", 0, FinishReason.CANCELLED, 0, OutputOptions()))

    def is_ready(self) -> bool:
        """What the model answers to Triton: no while the last start of every group's workers has failed.

        Workers that are being replaced are no reason: what comes meanwhile goes to others, or waits for the next ones.
        """
        self._triton_asks = True
        return self._groups.can_start()

    def close(self) -> None:
        """End every request and every worker. Each client still waiting is told."""
        self._closing = True
        self._intake_queue.close()
        for stream in list(self._streams.values()):
            if stream.decide(UNLOADING):
                self._replies.mark(stream)
        self._watcher.close()
        self._groups.close()
        self._groups.replies.ring()
        self._doorbell.join()
        self._replies.close()

    # Intake threads.

    def _take(self, inbound: Inbound, leader: SlotRef) -> None:
        """Write the request's slots and queue them. What goes wrong here is this request's alone."""
        try:
            streams = self._intake.prepare(inbound, leader)
        except RequestError as error:
            self._refuse(inbound, leader, ErrorKind.INVALID_ARG, "invalid", str(error))
        except NoRoom as error:
            self._refuse(inbound, leader, ErrorKind.UNAVAILABLE, "arena_full", str(error))
        except Over as over:
            self._finish_early(inbound, leader, over.verdict)
        except BaseException as error:  # a panic in `tokenizers` is no Exception
            log.exception("a request could not be prepared")
            self._pool.give_back(leader.slot)
            inbound.sender.fail(ErrorKind.INTERNAL, f"{type(error).__name__}: {error}")
            finished.failed(self.metrics, inbound.request_id)
        else:
            self._dispatch.assign(streams)
            for stream in streams:
                self._begin(stream)
            self.metrics.touch()

    def _begin(self, stream: Stream) -> None:
        self._streams[stream.slot] = stream
        self._watcher.add(stream)  # first: a stream that has been submitted may be over before the next line
        try:
            self._dispatch.submit(stream)
        except Exception as error:
            log.exception("a request could not be queued")
            self._end_with(stream, error)

    def _refuse(self, inbound: Inbound, leader: SlotRef, kind: ErrorKind, reason: str, words: str) -> None:
        self._pool.give_back(leader.slot)
        inbound.sender.fail(kind, words)
        finished.refused(self.metrics, inbound.request_id, reason, kind)

    def _finish_early(self, inbound: Inbound, leader: SlotRef, verdict: Verdict) -> None:
        assert verdict.error is not None
        self._pool.give_back(leader.slot)
        inbound.sender.fail(verdict.error, verdict.words)
        times = Times(arrival=inbound.arrival_ns, end=time.time_ns())
        ended = Finished(inbound.request_id, verdict.finish, verdict.error, 0, 0, 0, times)
        ended.log()
        self.metrics.count(FINISHED, value=ended.reason)  # and nothing else: it had no tokens

    # The doorbell thread.

    def _drain_forever(self) -> None:
        while not self._closing:
            self._groups.replies.wait()
            for group in self._groups.all:
                self._drain(group)

    def _drain(self, group: Group) -> None:
        touched = group.dirty.drain()
        if touched is None:
            self._rescan()
            return
        for ref in touched:
            stream = self._streams.get(ref.slot)
            if stream and stream.generation == ref.generation:
                self._touch(stream)

    def _rescan(self) -> None:
        for stream in list(self._streams.values()):
            self._touch(stream)

    def _touch(self, stream: Stream) -> None:
        published = self._arena.slots.published(stream.slot, stream.generation)
        self._replies.mark(stream)
        if published:
            self._dispatch.touched(stream, published)

    # Reply threads, and whoever ends a stream.

    def _answer(self, stream: Stream) -> None:
        before = stream.num_output_tokens
        try:
            stream.advance(self._arena.slots, self._dispatch.abort)
        except BaseException as error:  # as above
            log.exception("a reply could not be made")
            self._end_with(stream, error)
        self._account(stream, stream.num_output_tokens - before, is_first=not before)
        self._maybe_retire(stream)

    def _account(self, stream: Stream, num_tokens: int, *, is_first: bool) -> None:
        """Count what a reply thread has just brought to a stream."""
        self.metrics.count(GENERATION_TOKENS, num_tokens)
        if num_tokens and is_first:
            self.metrics.count(PROMPT_TOKENS, stream.num_input_tokens)
            self.metrics.count(PREFIX_HITS, stream.cached_tokens)
        if stream.finished:
            stream.finished.log()
            stream.finished.add_to(self.metrics)
            stream.finished = None

    def _end_with(self, stream: Stream, error: BaseException) -> None:
        if stream.decide(Verdict(FinishReason.ERROR, ErrorKind.INTERNAL, f"{type(error).__name__}: {error}")):
            self._end(stream)

    def _end(self, stream: Stream) -> None:
        """The stream has a verdict: stop computing it and tell the client."""
        try:
            self._dispatch.abort(stream)
        finally:
            self._replies.mark(stream)

    def _maybe_retire(self, stream: Stream) -> None:
        if not stream.may_retire():
            return
        self._watcher.discard(stream)
        del self._streams[stream.slot]
        self._intake.release(stream)

    # The thread of a group's supervisor.

    def _workers_died(self, group: Group, end: End) -> None:
        """No worker of the group is alive: what they had published is still sent, and others go on from there."""
        others = "the group again" if self._settings.tensor_parallel > 1 else "another"
        log.error("%s; starting %s", end.words, others)
        self.metrics.count(RESTARTS, self._settings.tensor_parallel)
        self.worker_counts.take()  # before they are cleared
        gone = group.went_down(is_blamed=not end.from_outside)
        self.worker_counts.take()
        for stream in gone:
            blame = f"the worker died {stream.deaths} times while it computed this request, the last time nothing else"
            if stream.convicted:
                stream.decide(Verdict(FinishReason.ERROR, ErrorKind.INTERNAL, blame))
            self._maybe_retire(stream)
        self._dispatch.forget(group.index)
        self._dispatch.move_from(group)
        if self._groups.failed_starts(group.index) >= MAX_FAILED_STARTS:
            self._end_all_of(group, f"the model cannot be loaded: {end.words}")
        self._rescan()

    def _end_all_of(self, group: Group, words: str) -> None:
        """Those that have no other group to go to. Where another one may come up they wait for it."""
        verdict = Verdict(FinishReason.ERROR, ErrorKind.UNAVAILABLE, words)
        may_move = {*group.movable(given=True)} if self._groups.can_start() else set()
        for stream in list(self._streams.values()):
            if stream.group == group.index and stream not in may_move and stream.decide(verdict):
                self._end(stream)

    def _is_wanted(self, is_serving: Callable[[], bool]) -> bool:
        """Whether Triton still wants the model: where it asks `is_ready`, its no may be only ours come back."""
        ours = self._triton_asks
        return (ours and not self._groups.can_start()) or is_serving() or (ours and not self._groups.can_start())

    def _refusal(self) -> str:
        if self._closing:
            return UNLOADING.words
        running = self._groups.num_running
        waiting = self._pool.num_taken - running
        return (
            f"the queue is full: {waiting} sequences wait and {running} run; "
            f"queue_size is {self._settings.queue_size} and max_running {self._settings.max_running}"
        )
