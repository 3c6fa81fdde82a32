"""The router's end of one group of workers: its queue, its command ring, and what has been posted to it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

from backend_lib.arena import Arena, CommandKind, Doorbell
from backend_lib.router.stream import Stream

# Sequences posted beyond those that can run, so that a worker that finishes one has the next at hand.
LOOKAHEAD = 8

# Commands of each posted sequence that can be unread at once. Between two looks at the ring a worker may release all it
# has, with their ABORTs unread, and as many others be admitted and aborted in their place.
_UNREAD = 3

# A sequence that has been in the batch at this many deaths of a worker, each without a token in between, is failed.
MAX_DEATHS = 3


def ring_records(max_running: int) -> int:
    """Records with which the ring of a worker that lives is never full."""
    return _UNREAD * (max_running + LOOKAHEAD)


class Group:
    """Posts waiting streams in order of priority, then arrival, as the worker finishes others.

    `_lock` guards the queue, `_posted` and every post: the ring has one producer, whichever thread that is.
    A stream leaves `_posted` when its worker has released it, or has died.
    """

    def __init__(self, arena: Arena, index: int, *, max_running: int, on_released: Callable[[Stream], None]) -> None:
        self.index = index
        self.ring = arena.ring(index)
        self.dirty = arena.dirty_list(index)
        self.commands = Doorbell()
        self.replies = Doorbell()
        self._arena = arena
        self._status = arena.status(index, 0)
        self._slots = arena.slots
        self._max_posted = max_running + LOOKAHEAD
        self._on_released = on_released
        self._lock = threading.Lock()
        self._queue: list[tuple[int, int, Stream]] = []
        self._posted: dict[int, Stream] = {}  # by slot, in the order of admission
        self._arrivals = 0
        self._up = False

    def submit(self, stream: Stream) -> None:
        """Queue a stream whose slot has been written."""
        with self._lock:
            self._arrivals += 1
            heapq.heappush(self._queue, (-stream.request.priority, self._arrivals, stream))
            self._post_waiting()

    def abort(self, stream: Stream) -> None:
        """The stream has a verdict: tell the worker, or forget the stream when the worker does not know it."""
        with self._lock:
            assert stream.verdict is not None
            if stream.released:
                return  # its slot may be another's by now
            self._slots.set_client_finish(stream.slot, stream.verdict.finish)
            if stream.posted and self._up:
                stream.last_command = self._post(CommandKind.ABORT, stream)
                return
            self._posted.pop(stream.slot, None)  # its worker is dead, and the next one is not given it
            stream.released = True  # if it is in the queue, it is skipped there
        self._on_released(stream)

    def settle(self, stream: Stream) -> None:
        """The worker has released the stream."""
        with self._lock:
            if stream.released:
                return
            stream.released = True
            del self._posted[stream.slot]
            self._post_waiting()
        self._on_released(stream)

    def streams(self) -> list[Stream]:
        """All that wait or have been posted."""
        with self._lock:
            return [stream for _, _, stream in self._queue if not stream.released] + list(self._posted.values())

    @property
    def num_streams(self) -> int:
        """How many wait or have been posted."""
        return len(self.streams())

    def came_up(self) -> None:
        """A worker is ready: it is given what the one before it had, in the same order, and then what waits."""
        with self._lock:
            self._up = True
            for stream in self._posted.values():
                self._admit(stream)
            self._post_waiting()

    def went_down(self) -> list[Stream]:
        """The worker is dead and reaped. Returns the streams that leave: over already, or suspected of its death."""
        with self._lock:
            was_up, self._up = self._up, False
            self.ring.discard()
            self._arena.set_epoch(self.index, self._arena.epoch(self.index) + 1)
            self._status.reset()
            for stream in self._posted.values() if was_up else ():  # no request kills a worker that still loads
                self._count_death(stream)
            gone = [stream for stream in self._posted.values() if stream.deaths >= MAX_DEATHS or self._is_over(stream)]
            for stream in gone:
                stream.released = True
                del self._posted[stream.slot]
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

    def _post_waiting(self) -> None:
        while self._up and self._queue and len(self._posted) < self._max_posted:
            stream = self._queue[0][2]
            if not stream.released:
                self._admit(stream)  # first: when that fails it still waits
                self._posted[stream.slot] = stream
                stream.posted = True
            heapq.heappop(self._queue)

    def _admit(self, stream: Stream) -> None:
        published = self._slots.published(stream.slot, stream.generation)
        stream.seen_at_start = published.output_len if published else 0
        stream.started_before = self._started_ns(stream)
        stream.first_started = stream.first_started or stream.started_before
        stream.last_command = self._post(CommandKind.ADMIT, stream)

    def _started_ns(self, stream: Stream) -> int:
        """When a worker last gave the sequence a row; each one that does stamps it anew."""
        return int(self._slots.headers["first_scheduled_ns"][stream.slot])

    def _post(self, kind: CommandKind, stream: Stream) -> int:
        sequence = self.ring.post(kind, stream.slot, stream.generation)
        self.commands.ring()
        return sequence
