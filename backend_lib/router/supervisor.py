"""Starts a group's worker, watches it, and starts another when it has died or hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from backend_lib.arena import Arena, Doorbell, WorkerState
from backend_lib.router.group import Group
from backend_lib.router.hang import HangWatch
from backend_lib.router.worker_process import WorkerProcess

log = logging.getLogger("tandem")

LOADING_POLL = 0.05  # seconds; a worker that loads is looked at this often
BACK_OFF = (0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds before the next start, by failed starts in a row


class Supervisor:
    """One thread, which alone starts workers: the kernel ends a worker when the thread that started it ends.

    `on_up(kv_tokens)` and `on_down(words)` are called in that thread; while `on_down` runs, no worker is alive.
    """

    def __init__(
        self,
        arena: Arena,
        group: Group,
        *,
        hang_seconds: float,
        on_up: Callable[[], None],
        on_down: Callable[[str], None],
    ) -> None:
        self._arena = arena
        self._group = group
        self._status = arena.status(group.index, 0)
        self._hang_seconds = hang_seconds
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
            words = self._run_worker()
            if self._stopping or self._gave_up(words):
                return
            self._on_down(words)
            self._back_off()

    def _run_worker(self) -> str:
        """One worker from start to end; how it ended, in words."""
        try:
            worker = WorkerProcess(self._arena, self._group, rank=0)
        except OSError as error:  # no interpreter, no memory for a process
            self.failed_starts += 1
            return f"a worker could not be started: {error}"
        try:
            return self._watch(worker)
        finally:
            worker.kill()

    def _watch(self, worker: WorkerProcess) -> str:
        """Follow a worker from start to end; how it ended, in words."""
        ended = False
        while not (ended or self._stopping) and self._status.state is not WorkerState.READY:
            ended = worker.wait(self._stop.fd, LOADING_POLL)
        if ended or self._stopping:
            self.failed_starts += 1
            return self._end_of(worker)
        self.failed_starts = 0
        log.info("worker %d is ready", worker.pid)
        self._on_up()
        if not self._first_load.done():
            self._first_load.set_result(self._status.kv_tokens)
        return self._watch_ready(worker)

    def _watch_ready(self, worker: WorkerProcess) -> str:
        watch = HangWatch(self._group, self._status, at_least=self._hang_seconds)
        while not (worker.wait(self._stop.fd, watch.period) or self._stopping):
            if watch.is_hung():
                return f"worker {worker.pid} made no progress for {watch.stuck:.1f} s and is ended"
        return self._end_of(worker)

    def _end_of(self, worker: WorkerProcess) -> str:
        return "stopped" if self._stopping else f"worker {worker.pid} {worker.end}: {self._status.error}"

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
