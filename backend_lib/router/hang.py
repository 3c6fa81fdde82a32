"""Tells a worker that hangs from one that is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

CHECKS = 20  # looks within the limit
SLOWEST_CHECK = 5.0  # seconds


class HangWatch:
    """Counts the time in which what has to change does not. Time in which this process did not run either (a container
    that was frozen) does not count.
    """

    def __init__(
        self,
        progress: Callable[[], Hashable],
        is_owed: Callable[[], bool],
        *,
        limit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`progress` changes with each step forward; while not `is_owed` none is expected. `limit` is in seconds."""
        self._get_progress = progress
        self._is_owed = is_owed
        self._limit = limit
        self.period = min(limit / CHECKS, SLOWEST_CHECK)
        self._clock = clock
        self._last = clock()
        self._progress: Hashable = None
        self.stuck = 0.0  # seconds without progress

    def is_hung(self) -> bool:
        """To be asked every `period` seconds."""
        now = self._clock()
        elapsed, self._last = now - self._last, now
        progress = self._get_progress()
        if progress != self._progress or not self._is_owed():
            self._progress, self.stuck = progress, 0.0
            return False
        self.stuck += min(elapsed, 2 * self.period)
        return self.stuck > self._limit
