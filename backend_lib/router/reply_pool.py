"""Threads that bring tokens to clients. A send is a round trip through Triton, so several are under way at once."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from backend_lib.router.stream import Stream

log = logging.getLogger("tandem")


class ReplyPool:
    """Runs `work(stream)` for streams that were marked dirty, for each stream in one thread at a time.

    A stream marked while its work is under way is worked on once more afterwards: what piled up meanwhile goes out as
    one response.
    """

    def __init__(self, num_threads: int, work: Callable[[Stream], None]) -> None:
        self._work = work
        self._queue: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._all_done = threading.Condition(self._lock)
        self._marks: dict[Stream, bool] = {}  # queued or under way; True: marked again while under way
        self._threads = [
            threading.Thread(target=self._run, name=f"tandem-reply-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def mark(self, stream: Stream) -> None:
        with self._lock:
            if stream in self._marks:
                self._marks[stream] = True
                return
            self._marks[stream] = False
        self._queue.put(stream)

    def close(self) -> None:
        """End the threads once everything marked so far has been worked on."""
        with self._all_done:
            self._all_done.wait_for(lambda: not self._marks)  # one marked while under way is queued only afterwards
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (stream := self._queue.get()) is not None:
            with self._lock:
                self._marks[stream] = False
            try:
                self._work(stream)
            except BaseException:  # a thread that ended would leave its streams without an answer
                log.exception("a reply failed")
            with self._lock:
                again = self._marks.pop(stream)
                if again:
                    self._marks[stream] = False
                elif not self._marks:
                    self._all_done.notify_all()
            if again:
                self._queue.put(stream)
