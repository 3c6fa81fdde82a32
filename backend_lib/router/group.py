"""The router's end of one group of workers: its queue, its command ring, and what has been posted to it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Hashable

from backend_lib.arena import LEAD_SHARE, Arena, CommandKind, Doorbell, Published
from backend_lib.router.stream import Stream
from backend_lib.router.trial import Trial, is_suspect

# Sequences posted beyond those that can run, so that a worker that finishes one has the next at hand.
LOOKAHEAD = 8

# Commands of each posted sequence that can be unread at once. Between two looks at the ring a worker may release all it
# has, with their ABORTs unread, and as many others be admitted and aborted in their place.
_UNREAD = 3


def ring_records(max_running: int) -> int:
    """Records with which the ring of workers that live is never full, however far other ranks are behind rank 0."""
    return _UNREAD * (max_running + LOOKAHEAD) * LEAD_SHARE // (LEAD_SHARE - 1)


class Group:
    """Posts waiting streams in order of priority, then arrival, as the worker finishes others.

    `_lock` guards the queue, `_given`, the trial and every post: the ring has one producer, whichever thread that is.
    `_given` holds what a worker has been given and has not released, through its death and until the next one's; a
    stream in it is `posted` when the present worker has it. `_waiting` holds the others; what is in `_queue` and no
    more in `_waiting` has left.

    A stream may go to another group while this one is down. So who comes with a stream looks under the lock whether it
    is still here.
    """

    def __init__(
        self, arena: Arena, index: int, *, replies: Doorbell, max_running: int,
        on_released: Callable[[Stream], None],
    ) -> None:  # fmt: skip
        """`replies`: the doorbell that the workers ring; all groups may have the same one."""
        self.index = index
        self.ring = arena.ring(index)
        self.dirty = arena.dirty_list(index)
        self.bells = [Doorbell() for _ in range(arena.spec.num_ranks)]  # each rank waits at its own
        self.replies = replies
        self._arena = arena
        self._slots = arena.slots
        self._max_posted = max_running + LOOKAHEAD
        self._on_released = on_released
        self._lock = threading.Lock()
        self._queue: list[tuple[int, int, Stream]] = []
        self._waiting: set[Stream] = set()
        self._given: dict[int, Stream] = {}  # by slot, in the order of admission
        self._trial = Trial()
        self._up = False

    @property
    def is_up(self) -> bool:
        """Whether a worker is there that computes."""
        return self._up

    def submit(self, stream: Stream) -> None:
        """Queue a stream whose slot has been written and whose group is this one. It may have ended already."""
        with self._lock:
            if stream.released or stream.group != self.index or self._holds(stream):
                return
            self._slots.headers["group"][stream.slot] = self.index
            self._waiting.add(stream)
            heapq.heappush(self._queue, (*_place(stream), stream))
            self._go_on()

    def abort(self, stream: Stream) -> bool:
        """The stream has a verdict: tell the worker, or forget the stream when the worker does not know it.

        False when it has gone to another group.
        """
        with self._lock:
            assert stream.verdict is not None
            if stream.group != self.index:
                return False
            if stream.released:
                return True  # its slot may be another's by now
            self._slots.set_client_finish(stream.slot, stream.verdict.finish)
            if stream.posted:
                stream.last_command = self._post(CommandKind.ABORT, stream)
                return True
            self._remove(stream)  # the worker that had it is dead, and another is not given it
            stream.released = True
        self._on_released(stream)
        return True

    def settle(self, stream: Stream) -> None:
        """The worker has released the stream."""
        with self._lock:
            if stream.released or stream.group != self.index:
                return
            stream.released = True
            self._remove(stream)
            self._go_on()
        self._on_released(stream)

    def movable(self, *, given: bool) -> list[Stream]:
        """Streams that another group may compute while this one is down, in their order: what waits, and with `given`
        what its workers had. A suspect stays: it could take the other group along.
        """
        with self._lock:
            found = [*self._waiting, *(self._given.values() if given else ())]
            may_go = [each for each in found if each.request.dp_rank is None and not is_suspect(each)]
            return sorted(may_go, key=_place) if not self._up else []

    def let_go(self, stream: Stream, to: int) -> bool:
        """Make the stream another group's, which it is to be submitted to. False when it may not go any more."""
        with self._lock:
            if self._up or stream.released or stream.group != self.index:
                return False
            self._remove(stream)
            stream.last_command = 0  # in this group's ring, which was discarded with the workers
            stream.group = to
            return True

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
        """Whether the workers have commands to read or sequences to compute."""
        with self._lock:
            posted = [stream for stream in self._given.values() if stream.posted]
            return not self.ring.passed_by_all(self.ring.head) or not all(map(self._is_released, posted))

    @property
    def progress(self) -> Hashable:
        """Changes whenever a worker has read a command or published something."""
        return self.ring.cursors, self.dirty.head

    @property
    def num_streams(self) -> int:
        """How many wait or have been posted."""
        return len(self._waiting) + len(self._given)

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
                self._remove(stream)
        return gone

    def _holds(self, stream: Stream) -> bool:
        return stream in self._waiting or self._given.get(stream.slot) is stream

    def _remove(self, stream: Stream) -> None:
        """From wherever it is."""
        self._waiting.discard(stream)
        self._given.pop(stream.slot, None)
        self._trial.drop(stream)

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
            if stream in self._waiting:
                self._admit(stream)  # first: when that fails it still waits
                self._waiting.discard(stream)
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


def _place(stream: Stream) -> tuple[int, int]:
    """In a queue: the higher priority first, then the earlier arrival."""
    return -stream.request.priority, stream.arrival
