"""Starts a group's worker, watches it, and starts another when it has died or hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from backend_lib.arena import Arena, Doorbell, WorkerState
from backend_lib.router.group import Group
from backend_lib.router.hang import HangWatch
from backend_lib.router.worker_process import WorkerProcess

log = logging.getLogger("tandem")

LOADING_POLL = 0.05  # seconds; a worker that loads is looked at this often
BACK_OFF = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds before the next start, by failed starts in a row


STEPS = 20  # of the length that the worker predicts: what takes longer than so many is no step any more


class End(NamedTuple):
    """How a worker ended, in words. `from_outside`: somebody killed it, which says nothing of what it computed."""

    words: str
    from_outside: bool = False


class Supervisor:
    """One thread, which alone starts workers: the kernel ends a worker when the thread that started it ends.

    `on_up()` and `on_down(end)` are called in that thread; while `on_down` runs, no worker is alive.
    """

    def __init__(
        self,
        arena: Arena,
        group: Group,
        *,
        hang_seconds: float,
        server: int | None = None,
        on_up: Callable[[], None],
        on_down: Callable[[End], None],
    ) -> None:
        self._arena = arena
        self._group = group
        self._status = arena.status(group.index, 0)
        self._hang_seconds = hang_seconds
        self._server = server
        self._on_up = on_up
        self._on_down = on_down
        self._stop = Doorbell()
        self._stopping = False
        self._first_load: Future[int] = Future()
        self.failed_starts = 0  # in a row
        self._thread = threading.Thread(target=self._run, name="tandem-supervisor", daemon=True)

    def start(self) -> int:
        """Start the worker and wait until it is ready; the tokens that its KV cache holds.

        Raises:
            RuntimeError: the worker could not load, in its own words.
        """
        self._thread.start()
        return self._first_load.result()

    def close(self) -> None:
        """End the worker and the thread."""
        self._stopping = True
        self._stop.ring()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            end = self._run_worker()
            if self._stopping or self._gave_up(end.words):
                return
            self._on_down(end)
            self._back_off()

    def _run_worker(self) -> End:
        """One worker from start to end."""
        try:
            worker = WorkerProcess(self._arena, self._group, rank=0, server=self._server)
        except OSError as error:  # no interpreter, no memory for a process
            self.failed_starts += 1
            return End(f"a worker could not be started: {error}")
        try:
            return self._watch_loading(worker) or self._watch_ready(worker)
        finally:
            worker.kill()

    def _watch_loading(self, worker: WorkerProcess) -> End | None:
        """None when the worker is ready."""
        watch = HangWatch(lambda: worker.activity, lambda: True, limit=self._hang_seconds)
        if end := self._watch(worker, watch, until_ready=True):
            self.failed_starts += not end.from_outside
            return end
        self.failed_starts = 0
        log.info("worker %d is ready", worker.pid)
        self._on_up()
        if not self._first_load.done():
            self._first_load.set_result(self._status.kv_tokens)
        return None

    def _watch_ready(self, worker: WorkerProcess) -> End:
        """Progress is anything that a worker does with work: it reads a command, publishes, or its KV use changes.

        Steps are not progress: a loop that plans nothing for ever takes many.
        """
        watch = HangWatch(
            lambda: (self._group.progress, self._status.load._replace(step=0)),
            lambda: self._group.owed,
            limit=max(self._hang_seconds, STEPS * self._status.predicted_step),
        )
        end = self._watch(worker, watch)
        assert end is not None
        return end

    def _watch(self, worker: WorkerProcess, watch: HangWatch, *, until_ready: bool = False) -> End | None:
        """Follow a worker until it has ended, hangs, or, if that is asked, is ready (None)."""
        period = min(watch.period, LOADING_POLL) if until_ready else watch.period
        while not (until_ready and self._status.state is WorkerState.READY):
            if worker.wait(self._stop.fd, period) or self._stopping:
                return self._end_of(worker)
            if watch.is_hung():
                return End(f"worker {worker.pid} made no progress for {watch.stuck:.1f} s and is ended")
        return None

    def _end_of(self, worker: WorkerProcess) -> End:
        if self._stopping:
            return End("stopped")
        return End(f"worker {worker.pid} {worker.end}: {self._status.error}", worker.was_killed_from_outside)

    def _gave_up(self, words: str) -> bool:
        """The first load is not tried again: the one who asked for it is told."""
        if self._first_load.done():
            return False
        self._first_load.set_exception(RuntimeError(words))
        return True

    def _back_off(self) -> None:
        pause = BACK_OFF[min(self.failed_starts, len(BACK_OFF) - 1)]
        deadline = time.monotonic() + pause
        while not self._stopping and time.monotonic() < deadline:
            self._stop.wait(timeout=deadline - time.monotonic())
