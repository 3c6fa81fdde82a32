"""Tells a worker that hangs from one that is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from backend_lib.arena import StatusBlock
from backend_lib.router.group import Group

STEPS = 20  # of the length that the worker predicts: what takes longer than so many is no step any more
CHECKS = 20  # looks within the limit
SLOWEST_CHECK = 5.0  # seconds


class HangWatch:
    """Progress is anything that a worker does with work: it reads a command, publishes, or its KV use changes.

    Steps are not progress: a loop that plans nothing for ever takes many. A worker that owes nothing cannot hang. Time
    in which this process did not run either (a container that was frozen) does not count.
    """

    def __init__(
        self, group: Group, status: StatusBlock, *, at_least: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._group = group
        self._status = status
        self.limit = max(at_least, STEPS * status.predicted_step)  # seconds
        self.period = min(self.limit / CHECKS, SLOWEST_CHECK)
        self._clock = clock
        self._last = clock()
        self._progress: Hashable = None
        self.stuck = 0.0  # seconds without progress

    def is_hung(self) -> bool:
        """To be asked every `period` seconds while the worker is up."""
        now = self._clock()
        elapsed, self._last = now - self._last, now
        progress = (self._group.progress, self._status.load._replace(step=0))
        if progress != self._progress or not self._group.owed:
            self._progress, self.stuck = progress, 0.0
            return False
        self.stuck += min(elapsed, 2 * self.period)
        return self.stuck > self.limit
