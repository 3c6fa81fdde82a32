"""What befalls a server's worker: it is killed, stopped for a while, and starved, at random moments."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from tests.support.server import RunningServer

LOADING = (0.0, 1.5)  # seconds into a worker's start


@dataclass
class Disturber:
    """A thread that disturbs until `end`, the same way for the same seed as far as time allows.

    `stops`: how long a worker is stopped, in seconds.
    """

    server: RunningServer
    seed: int
    pause: tuple[float, float] = (0.1, 1.5)  # seconds between two disturbances
    stops: tuple[float, float] = (0.05, 0.8)
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        acts = [self._kill, self._kill, self._kill_while_loading, self._stop, self._starve]
        try:
            while not self._over.wait(self._rng.uniform(*self.pause)):
                self._rng.choice(acts)()
        except BaseException as failure:
            self._failure = failure

    def _kill(self) -> psutil.Process | None:
        """Kill a worker that has loaded; which."""
        worker = self._worker()
        if worker is None or not is_ready(self.server, worker.pid):
            return None
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
            self.done["kills"] += 1
        return worker

    def _kill_while_loading(self) -> None:
        """Once more at most twice: five starts that fail in a row make the model unavailable, which is right."""
        killed = self._kill()
        for _ in range(self._rng.choice([1, 1, 2]) if killed else 0):
            killed = self._next_worker(killed)
            if killed is None or self._over.wait(self._rng.uniform(*LOADING)) or is_ready(self.server, killed.pid):
                return
            killed.kill()
            self.done["kills of a loading worker"] += 1

    def _next_worker(self, before: psutil.Process | None) -> psutil.Process | None:
        while (worker := self._worker()) in (None, before):
            if self._over.wait(0.01):
                return None
        return worker

    def _stop(self) -> None:
        worker = self._worker()
        if worker is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.suspend()
            self.done["stops"] += 1
            time.sleep(self._rng.uniform(*self.stops))
            worker.resume()

    def _starve(self) -> None:
        """Neighbours that never rest on each of the worker's cores, and a priority below theirs."""
        worker = self._worker()
        if worker is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess), neighbours(worker.cpu_affinity()):
            worker.nice(self._rng.choice([0, 5, 10]))
            self.done["starvings"] += 1
            time.sleep(self._rng.uniform(0.2, 1.0))
            with contextlib.suppress(psutil.AccessDenied):  # only root may raise it again
                worker.nice(0)

    def _worker(self) -> psutil.Process | None:
        """The worker that has not ended, if there is one just now."""
        for pid in self.server.worker_pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and "backend_lib.worker" in process.cmdline():
                    return process
        return None


def is_ready(server: RunningServer, pid: int) -> bool:
    """Whether this worker has finished loading, as the log says."""
    return f"worker {pid} is ready" in server.log


@contextlib.contextmanager
def neighbours(cores: list[int]) -> Iterator[None]:
    """A process on each of these cores that computes for ever."""
    busy = []
    try:
        for core in cores:
            code = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
            busy.append(subprocess.Popen([sys.executable, "-c", code]))
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()
