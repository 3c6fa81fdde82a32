"""What befalls a server's worker: it is killed, stopped for a while or for good, and starved, at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from tests.support.server import RunningServer

HUNG = re.compile(r"worker \d+ made no progress for")  # the supervisor's words


@dataclass
class Disturber:
    """A thread that disturbs until `end`: all kinds in random order, again and again, the same for the same seed.

    `done` counts what befell workers; `rounds` how often it has been through all kinds.
    """

    server: RunningServer
    seed: int
    pause: tuple[float, float] = (0.1, 1.0)  # seconds between two disturbances
    life: tuple[float, float] = (1.0, 3.0)  # seconds that a worker has lived when it is killed, but for
    short_life: tuple[float, float] = (0.0, 0.5)  # every third
    loading: tuple[float, float] = (0.0, 1.5)  # seconds into a worker's start until it is killed
    stops: tuple[float, float] = (0.05, 0.8)  # seconds; shorter than `hang_seconds`
    done: Counter[str] = field(default_factory=Counter)
    rounds: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._over = threading.Event()
        self._lives = 0
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        if self.failure:
            raise self.failure

    @property
    def replaced(self) -> int:
        """How many workers must have been replaced."""
        return self.done["killed"] + self.done["killed while loading"] + self.done["hung"]

    def _run(self) -> None:
        acts = [self._kill, self._kill_while_loading, self._stop, self._stop_for_good, self._starve]
        try:
            while True:
                for act in self._rng.sample(acts, len(acts)):
                    if self._over.wait(self._rng.uniform(*self.pause)):
                        return
                    act()
                self.rounds += 1
        except BaseException as failure:
            self.failure = failure

    def _kill(self) -> psutil.Process | None:
        worker = self._grown_worker()
        if worker:
            worker.kill()
            self.done["killed"] += 1
        return worker

    def _kill_while_loading(self) -> None:
        """Then the next one, and perhaps that after it: a model that fails to load five times in a row is given up."""
        killed = self._kill()
        for _ in range(self._rng.choice([1, 1, 2]) if killed else 0):
            killed = self._next_worker(killed)
            if killed is None or self._over.wait(self._rng.uniform(*self.loading)) or is_ready(self.server, killed):
                return
            killed.kill()
            self.done["killed while loading"] += 1

    def _stop(self) -> None:
        """A worker that is slow to come back, whether it has loaded or not."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if worker := self._next_worker(None):
                worker.suspend()
                time.sleep(self._rng.uniform(*self.stops))
                worker.resume()
                self.done["stopped"] += 1

    def _stop_for_good(self) -> None:
        """Under load it is owed an answer, so the supervisor must see that it hangs."""
        if worker := self._grown_worker():
            worker.suspend()
            self.done["hung"] += 1
            if self._next_worker(worker, timeout=20) is None:
                worker.kill()  # it could not end by itself
                assert self._over.is_set(), f"stopped worker {worker.pid} is not replaced:\n{self.server.log[-2000:]}"

    def _starve(self) -> None:
        """Neighbours that never rest on each of the worker's cores, and a priority below theirs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if worker := self._next_worker(None):
                with neighbours(worker.cpu_affinity()):
                    worker.nice(self._rng.choice([0, 5, 10]))
                    time.sleep(self._rng.uniform(0.2, 1.0))
                with contextlib.suppress(psutil.AccessDenied):  # only root may raise it again
                    worker.nice(0)
                self.done["starved"] += 1

    def _grown_worker(self) -> psutil.Process | None:
        """A worker that has lived for a while since it had loaded; None when it is all over first.

        Most live so long that every request in the batch gets a token: three deaths without one, the last of them
        alone in the batch, are rightly a request's fault.
        """
        while not ((worker := self._worker()) and is_ready(self.server, worker)):
            if self._over.wait(0.02):
                return None
        self._lives += 1
        life = self._rng.uniform(*(self.life if self._lives % 3 else self.short_life))
        return None if self._over.wait(life) else worker

    def _next_worker(self, before: psutil.Process | None, timeout: float = 60) -> psutil.Process | None:
        """None when it is all over first, or time is up."""
        deadline = time.monotonic() + timeout
        while (worker := self._worker()) in (None, before):
            if self._over.wait(0.05) or time.monotonic() > deadline:
                return None
        return worker

    def _worker(self) -> psutil.Process | None:
        """The worker that has not ended, if there is one just now."""
        for pid in self.server.worker_pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and "backend_lib.worker" in process.cmdline():
                    return process
        return None


def is_ready(server: RunningServer, worker: psutil.Process) -> bool:
    """Whether this worker has finished loading, as the log says."""
    return f"worker {worker.pid} is ready" in server.log


@contextlib.contextmanager
def neighbours(cores: list[int]) -> Iterator[None]:
    """A process on each of these cores that computes for as long as this one lives."""
    busy = []
    try:
        for core in cores:
            code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile os.getppid() == {os.getpid()}: pass"
            busy.append(subprocess.Popen([sys.executable, "-c", code]))
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()
