"""The workers of one group: a process for each rank, which live and end together."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from backend_lib.arena import Arena, WorkerState
from backend_lib.arena.names import of_group, worker_name
from backend_lib.router.group import Group
from backend_lib.router.seats import Seat
from backend_lib.router.worker_process import WorkerProcess

# Seconds for the other ranks to end by themselves. A rank's sockets close before it can be waited for, so one that has
# merely lost its group may be seen to end before the one that is the cause.
GRACE = 0.2
# Of a core: a rank that takes less may do nothing but wait, which collectives do with a look a hundred times a second.
IDLE = 0.01
_TICKS = os.sysconf("SC_CLK_TCK")  # a second


class End(NamedTuple):
    """How a group's workers ended, in words. `from_outside`: somebody killed one, which says nothing of what it
    computed."""

    words: str
    from_outside: bool = False


class Workers:
    """All ranks of a group from their start to their end. For one thread, which outlives them."""

    def __init__(self, arena: Arena, group: Group, *, seats: Sequence[Seat], server: int | None) -> None:
        """Raises OSError when one cannot be started; then none is left."""
        self._group = group
        self._arena = arena
        self.statuses = [arena.status(group.index, rank) for rank in range(len(seats))]
        self._ended: list[WorkerProcess] = []  # in the order in which it was seen
        self._processes: list[WorkerProcess] = []
        try:
            for rank, seat in enumerate(seats):
                self._processes.append(WorkerProcess(arena, group, rank=rank, seat=seat, server=server))
        except OSError:
            self.kill()
            raise

    @property
    def are_ready(self) -> bool:
        return all(status.state is WorkerState.READY for status in self.statuses)

    def activity(self, seconds: float) -> Hashable:
        """Changes within so many seconds while any of them reads, or computes for more than one does that merely waits
        for another."""
        ticks = max(1, int(seconds * IDLE * _TICKS))
        return tuple(process.activity(ticks) for process in self._processes)

    @property
    def predicted_step(self) -> float:
        """Seconds that a full step is expected to take on the slowest rank."""
        return max(status.predicted_step for status in self.statuses)

    def wait(self, timeout: float, stop_fd: int | None = None) -> bool:
        """Wait until another one has ended, `stop_fd` is readable, or time is up; whether any has ended."""
        poll = select.poll()
        for fd in [process.pidfd for process in self._alive()] + ([] if stop_fd is None else [stop_fd]):
            poll.register(fd, select.POLLIN)
        poll.poll(timeout * 1000)
        self._ended += [process for process in self._alive() if process.has_ended]
        return bool(self._ended)

    def end(self) -> End:
        """How the group ended, one of which has: by the first rank that was killed from outside, of which no other rank
        can be the cause, else by the first that did not merely lose its group, else by the first.
        """
        deadline = time.monotonic() + GRACE
        while self._alive() and (left := deadline - time.monotonic()) > 0:
            self.wait(left)
        cause = min(self._ended, key=lambda each: (not each.was_killed_from_outside, each.lost_its_group))
        said = self.statuses[cause.rank].error  # nothing, when it was killed
        words = f"{self._named(cause)} {cause.end}{f': {said}' if said else ''}"
        return End(words, cause.was_killed_from_outside)

    def kill(self) -> None:
        """End those that live and wait for all."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.reap()

    def hung(self, seconds: float) -> End:
        """What to say of workers that are to be ended because they did nothing for so long."""
        pids = ", ".join(str(process.pid) for process in self._processes)
        who, verb = (f"workers {pids}", "are") if len(self._processes) > 1 else (f"worker {pids}", "is")
        whose = of_group(self._arena.spec, self._group.index)
        return End(f"{who}{whose} made no progress for {seconds:.1f} s and {verb} ended")

    @property
    def names(self) -> list[str]:
        """Of each rank, for the log."""
        return [self._named(process) for process in self._processes]

    def _named(self, process: WorkerProcess) -> str:
        return worker_name(self._arena.spec, process.pid, self._group.index, process.rank)

    def _alive(self) -> list[WorkerProcess]:
        return [process for process in self._processes if process not in self._ended]
