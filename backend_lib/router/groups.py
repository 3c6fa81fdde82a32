"""All groups of workers behind one router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial

from backend_lib.arena import Arena, Doorbell, WorkerState
from backend_lib.config import Settings
from backend_lib.router.dispatch import Dispatch
from backend_lib.router.group import Group
from backend_lib.router.metrics_pusher import Look
from backend_lib.router.seats import Seat
from backend_lib.router.stream import Stream
from backend_lib.router.supervisor import Supervisor
from backend_lib.router.workers import End


class Groups:
    """Each group has its own ring, workers, supervisor and trial, so that what befalls one changes nothing in another.

    They share one doorbell, `replies`, which all workers ring.
    """

    def __init__(
        self, arena: Arena, settings: Settings, seats: Sequence[Sequence[Seat]], *, server: int | None,
        on_released: Callable[[Stream], None], on_down: Callable[[Group, End], None],
    ) -> None:  # fmt: skip
        """`on_down` is called in the supervisor's thread of the group, while no worker of it is alive."""
        self.replies = Doorbell()
        self._arena = arena
        self.all = [
            Group(arena, index, replies=self.replies, max_running=settings.max_running, on_released=on_released)
            for index in range(settings.data_parallel)
        ]
        self.dispatch = Dispatch(
            self.all,
            arena.slots,
            max_running=settings.max_running,
            can_start=lambda index: not self.failed_starts(index),
        )
        self._supervisors = [
            Supervisor(
                arena, group, seats=seats[group.index], hang_seconds=settings.hang_seconds, server=server,
                on_up=partial(self._came_up, group), on_down=partial(on_down, group),
            )
            for group in self.all
        ]  # fmt: skip

    def load(self) -> int:
        """Start all workers at the same time and wait for them; the tokens that the smallest KV cache holds.

        Raises:
            RuntimeError: a worker could not load, in its own words. None is left.
        """
        for supervisor in self._supervisors:
            supervisor.start()
        loads = [supervisor.first_load for supervisor in self._supervisors]
        failed = [load for load in wait(loads, return_when=FIRST_EXCEPTION).done if load.exception()]
        if failed:
            self.close()
            failed[0].result()
        return min(load.result() for load in loads)

    def close(self) -> None:
        """End all workers."""
        for supervisor in self._supervisors:
            supervisor.stop()
        for supervisor in self._supervisors:
            supervisor.close()

    def failed_starts(self, group: int) -> int:
        """Of a group's workers, in a row."""
        return self._supervisors[group].failed_starts

    def pause(self, group: int) -> float:
        """Seconds from an end of a group's workers to the start of the next ones."""
        return self._supervisors[group].pause

    def can_start(self) -> bool:
        """Whether any group's last start did not fail."""
        return not all(supervisor.failed_starts for supervisor in self._supervisors)

    def looks(self) -> list[Look]:
        """Of each group."""
        return [self._look(group) for group in self.all]

    @property
    def num_running(self) -> int:
        return sum(look.load.running for look in self.looks())

    def _look(self, group: Group) -> Look:
        statuses = [self._arena.status(group.index, rank) for rank in range(self._arena.spec.num_ranks)]
        first, ready = statuses[0], [status.state is WorkerState.READY for status in statuses]
        return Look(
            first.load, first.heartbeat_ns, first.kv_tokens, group.num_streams, num_ready=sum(ready),
            num_workers=len(ready),
        )  # fmt: skip

    def _came_up(self, group: Group) -> None:
        self.dispatch.set_kv_tokens(group.index, self._arena.status(group.index, 0).kv_tokens)
        group.came_up()
        self.dispatch.move_from_all()
