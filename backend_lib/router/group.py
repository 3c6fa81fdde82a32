"""The router's end of one group of workers: its queue, its command ring, and what has been posted to it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Hashable

from backend_lib.arena import Arena, CommandKind, Doorbell, Published
from backend_lib.router.stream import Stream
from backend_lib.router.trial import Trial

# Sequences posted beyond those that can run, so that a worker that finishes one has the next at hand.
LOOKAHEAD = 8

# Commands of each posted sequence that can be unread at once. Between two looks at the ring a worker may release all it
# has, with their ABORTs unread, and as many others be admitted and aborted in their place.
_UNREAD = 3


def ring_records(max_running: int) -> int:
    """Records with which the ring of a worker that lives is never full."""
    return _UNREAD * (max_running + LOOKAHEAD)


class Group:
    """Posts waiting streams in order of priority, then arrival, as the worker finishes others.

    `_lock` guards the queue, `_given`, the trial and every post: the ring has one producer, whichever thread that is.
    `_given` holds what a worker has been given and has not released, through its death and until the next one's; a
    stream in it is `posted` when the present worker has it.
    """

    def __init__(self, arena: Arena, index: int, *, max_running: int, on_released: Callable[[Stream], None]) -> None:
        self.index = index
        self.ring = arena.ring(index)
        self.dirty = arena.dirty_list(index)
        self.bells = [Doorbell() for _ in range(arena.spec.num_ranks)]  # each rank waits at its own
        self.replies = Doorbell()
        self._arena = arena
        self._slots = arena.slots
        self._max_posted = max_running + LOOKAHEAD
        self._on_released = on_released
        self._lock = threading.Lock()
        self._queue: list[tuple[int, int, Stream]] = []
        self._given: dict[int, Stream] = {}  # by slot, in the order of admission
        self._trial = Trial()
        self._arrivals = 0
        self._up = False

    def submit(self, stream: Stream) -> None:
        """Queue a stream whose slot has been written."""
        with self._lock:
            self._arrivals += 1
            heapq.heappush(self._queue, (-stream.request.priority, self._arrivals, stream))
            self._go_on()

    def abort(self, stream: Stream) -> None:
        """The stream has a verdict: tell the worker, or forget the stream when the worker does not know it."""
        with self._lock:
            assert stream.verdict is not None
            if stream.released:
                return  # its slot may be another's by now
            self._slots.set_client_finish(stream.slot, stream.verdict.finish)
            if stream.posted:
                stream.last_command = self._post(CommandKind.ABORT, stream)
                return
            self._given.pop(stream.slot, None)  # the worker that had it is dead, and another is not given it
            self._trial.drop(stream)
            stream.released = True  # if it is in the queue, it is skipped there
        self._on_released(stream)

    def settle(self, stream: Stream) -> None:
        """The worker has released the stream."""
        with self._lock:
            if stream.released:
                return
            stream.released = True
            del self._given[stream.slot]
            self._trial.drop(stream)
            self._go_on()
        self._on_released(stream)

    def touched(self, stream: Stream, published: Published) -> None:
        """The worker has said something of the stream."""
        if published.released:
            self.settle(stream)
        elif stream is self._trial.accused:
            with self._lock:
                if published.output_len > stream.seen_at_start:  # a token of the present worker
                    self._trial.drop(stream)
                    self._go_on()

    @property
    def owed(self) -> bool:
        """Whether the worker has commands to read or sequences to compute."""
        with self._lock:
            posted = [stream for stream in self._given.values() if stream.posted]
            return not self.ring.passed_by_all(self.ring.head) or not all(map(self._is_released, posted))

    @property
    def progress(self) -> Hashable:
        """Changes whenever a worker has read a command or published something."""
        return self.ring.cursors, self.dirty.head

    def streams(self) -> list[Stream]:
        """All that wait or have been posted."""
        with self._lock:
            return [stream for _, _, stream in self._queue if not stream.released] + list(self._given.values())

    @property
    def num_streams(self) -> int:
        """How many wait or have been posted."""
        return len(self.streams())

    def came_up(self) -> None:
        """A worker is ready: it is given what the one before it had, in the same order, and then what waits."""
        with self._lock:
            self._up = True
            self._trial = Trial(self._given.values())
            self._go_on()

    def went_down(self, *, is_blamed: bool = True) -> list[Stream]:
        """The worker is dead and reaped. Returns the streams that leave: over already, or convicted of its death.

        `is_blamed`: what it computed may be the cause.
        """
        with self._lock:
            was_up, self._up = self._up, False
            self._arena.clear_group(self.index)
            for stream in self._given.values():
                if was_up and is_blamed:  # no request kills a worker that still loads
                    self._count_death(stream)
                stream.posted = False
            self._trial = Trial()
            gone = [stream for stream in self._given.values() if stream.convicted or self._is_over(stream)]
            for stream in gone:
                stream.released = True
                del self._given[stream.slot]
        return gone

    def _is_over(self, stream: Stream) -> bool:
        published = self._slots.published(stream.slot, stream.generation)
        return bool(stream.verdict or (published and published.finish))

    def _count_death(self, stream: Stream) -> None:
        """A death counts only against sequences that the worker had begun and that published nothing since."""
        if self._started_ns(stream) == stream.started_before:
            return
        published = self._slots.published(stream.slot, stream.generation)
        progress = published is not None and published.output_len > stream.seen_at_start
        stream.deaths = 0 if progress else stream.deaths + 1
        stream.convicted = not progress and self._trial.convicts(stream)

    def _is_released(self, stream: Stream) -> bool:
        published = self._slots.published(stream.slot, stream.generation)
        return bool(published and published.released)

    def _go_on(self) -> None:
        """Give the worker what it may have now: a suspect alone, or else what the last one had, or else what waits."""
        if not self._up:
            return
        if not self._trial.is_over:
            if suspect := self._trial.next():
                self._admit(suspect)
            return
        for stream in self._given.values():
            if not stream.posted:
                self._admit(stream)
        self._post_waiting()

    def _post_waiting(self) -> None:
        while self._queue and len(self._given) < self._max_posted:
            stream = self._queue[0][2]
            if not stream.released:
                self._admit(stream)  # first: when that fails it still waits
                self._given[stream.slot] = stream
            heapq.heappop(self._queue)

    def _admit(self, stream: Stream) -> None:
        published = self._slots.published(stream.slot, stream.generation)
        stream.seen_at_start = published.output_len if published else 0
        stream.started_before = self._started_ns(stream)
        stream.first_started = stream.first_started or stream.started_before
        stream.last_command = self._post(CommandKind.ADMIT, stream, stream.seen_at_start)
        stream.posted = True

    def _started_ns(self, stream: Stream) -> int:
        """When a worker last gave the sequence a row; each one that does stamps it anew."""
        return int(self._slots.headers["first_scheduled_ns"][stream.slot])

    def _post(self, kind: CommandKind, stream: Stream, argument: int = 0) -> int:
        sequence = self.ring.post(kind, stream.slot, stream.generation, argument)
        self.bells[0].ring()  # rank 0 tells the others
        return sequence
