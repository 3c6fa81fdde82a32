"""Starts a group's workers, watches them, and starts others when one has died or they hang."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from backend_lib.arena import Arena, Doorbell
from backend_lib.router.group import Group
from backend_lib.router.hang import HangWatch
from backend_lib.router.seats import Seat
from backend_lib.router.workers import End, Workers

log = logging.getLogger("tandem")

LOADING_POLL = 0.05  # seconds; a worker that loads is looked at this often
BACK_OFF = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds before the next start, by failed starts in a row
STEPS = 20  # of the length that the workers predict: what takes longer than so many is no step any more


class Supervisor:
    """One thread, which alone starts the group's workers: the kernel ends a worker with the thread that started it.

    `on_up()` and `on_down(end)` are called in that thread; while `on_down` runs, no worker is alive.
    """

    def __init__(
        self,
        arena: Arena,
        group: Group,
        *,
        seats: Sequence[Seat],
        hang_seconds: float,
        server: int | None = None,
        on_up: Callable[[], None],
        on_down: Callable[[End], None],
    ) -> None:
        """`seats`: of each rank."""
        self._arena = arena
        self._group = group
        self._seats = seats
        self._hang_seconds = hang_seconds
        self._server = server
        self._on_up = on_up
        self._on_down = on_down
        self._stop = Doorbell()
        self._stopping = False
        self.first_load: Future[int] = Future()  # the tokens that the KV cache holds; RuntimeError: why it failed
        self.failed_starts = 0  # in a row
        self._thread = threading.Thread(target=self._run, name="tandem-supervisor", daemon=True)

    def start(self) -> None:
        """Start the workers, whose first load ends in `first_load`."""
        self._thread.start()

    def stop(self) -> None:
        """Have the workers and the thread ended; `close` waits."""
        self._stopping = True
        self._stop.ring()

    def close(self) -> None:
        """End the workers and the thread."""
        self.stop()
        self._thread.join()

    @property
    def pause(self) -> float:
        """Seconds from an end of the workers to the start of the next ones."""
        return BACK_OFF[min(self.failed_starts, len(BACK_OFF) - 1)]

    def _run(self) -> None:
        while not self._stopping:
            end = self._run_workers()
            if self._stopping or self._gave_up(end.words):
                return
            self._on_down(end)
            self._back_off()

    def _run_workers(self) -> End:
        """The group's workers from start to end."""
        try:
            workers = Workers(self._arena, self._group, seats=self._seats, server=self._server)
        except OSError as error:  # no interpreter, no memory for a process
            self.failed_starts += 1
            return End(f"a worker could not be started: {error}")
        try:
            return self._watch_loading(workers) or self._watch_ready(workers)
        finally:
            workers.kill()

    def _watch_loading(self, workers: Workers) -> End | None:
        """None when all are ready."""
        limit = self._hang_seconds
        watch = HangWatch(lambda: workers.activity(limit), lambda: True, limit=limit)
        if end := self._watch(workers, watch, until_ready=True):
            self.failed_starts += not end.from_outside
            return end
        self.failed_starts = 0
        for name in workers.names:
            log.info("%s is ready", name)
        self._on_up()
        if not self.first_load.done():
            self.first_load.set_result(workers.statuses[0].kv_tokens)
        return None

    def _watch_ready(self, workers: Workers) -> End:
        """Progress is anything that workers do with work: one reads a command, publishes, or its KV use changes.

        Steps are not progress: a loop that plans nothing for ever takes many.
        """
        watch = HangWatch(
            lambda: (self._group.progress, workers.statuses[0].load._replace(step=0)),
            lambda: self._group.owed,
            limit=max(self._hang_seconds, STEPS * workers.predicted_step),
        )
        end = self._watch(workers, watch)
        assert end is not None
        return end

    def _watch(self, workers: Workers, watch: HangWatch, *, until_ready: bool = False) -> End | None:
        """Follow workers until one has ended, they hang, or, if that is asked, all are ready (None)."""
        period = min(watch.period, LOADING_POLL) if until_ready else watch.period
        while not (until_ready and workers.are_ready):
            has_ended = workers.wait(period, self._stop.fd)
            if self._stopping:
                return End("stopped")
            if has_ended:
                return workers.end()
            if watch.is_hung():
                return workers.hung(watch.stuck)
        return None

    def _gave_up(self, words: str) -> bool:
        """The first load is not tried again: the one who asked for it is told."""
        if self.first_load.done():
            return False
        self.first_load.set_exception(RuntimeError(words))
        return True

    def _back_off(self) -> None:
        deadline = time.monotonic() + self.pause
        while not self._stopping and time.monotonic() < deadline:
            self._stop.wait(timeout=deadline - time.monotonic())
