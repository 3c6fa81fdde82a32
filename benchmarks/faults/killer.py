"""Kills a router's workers while a round of requests runs, and times how long their streams stand still."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import dataclass, field

import psutil

from backend_lib.arena import WorkerState
from backend_lib.router.router import Router
from benchmarks.faults.requests import Round
from tests.support.engine import pids_of, wait_until

FLOWING = (0.2, 3.0)  # seconds that streams flow before the next kill
LOADING = (0.0, 2.5)  # seconds into a worker's start
LOADING_SHARE = 0.2  # of the kills are followed by another while the next worker loads
PATIENCE = 120.0  # seconds after which a stream that stands still counts as lost


@dataclass(frozen=True)
class Stall:
    """Seconds from the last kill until some stream, and until every stream, had its next token."""

    streams: int
    loading_kills: int
    first: float
    every: float


@dataclass
class Killer:
    router: Router
    wanted: int
    rng: random.Random
    kills: int = 0
    loading_kills: int = 0
    stalls: list[Stall] = field(default_factory=list)

    def run(self, asked: Round) -> None:
        """Kill until the round is over or there have been enough kills. Each stream flows between two kills."""
        self._wait_flowing(asked, asked.published())
        while not asked.is_over and self.kills < self.wanted:
            _wait_over(asked, self.rng.uniform(*FLOWING))
            if not asked.is_over:
                self._strike(asked)
        _wait_over(asked, PATIENCE)

    def _strike(self, asked: Round) -> None:
        killed_at = self._kill()
        if killed_at is None:
            return
        before, loading = asked.published(), 0
        while self.rng.random() < LOADING_SHARE and (again := self._kill_loading()):
            killed_at, loading = again, loading + 1
        times = self._wait_flowing(asked, before)
        if times:
            self.stalls.append(Stall(len(times), loading, min(times) - killed_at, max(times) - killed_at))

    def _wait_flowing(self, asked: Round, before: dict[int, int]) -> list[float]:
        """When each stream had more than it had before, once all have or have ended without."""
        senders = [(asked.running[place].sender, tokens) for place, tokens in before.items()]
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            times = [sender.when_beyond(tokens) for sender, tokens in senders]
            if all(when or sender.done.is_set() for when, (sender, _) in zip(times, senders, strict=True)):
                break
            time.sleep(0.005)
        return [when for when in times if when]

    def _kill(self) -> float | None:
        """Kill one of the workers and wait until it is reaped; when. None when there is none."""
        pids = pids_of(self.router)
        if not pids:
            return None
        pid = self.rng.choice(pids)
        killed_at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid))
        self.kills += 1
        return killed_at

    def _kill_loading(self) -> float | None:
        wait_until(lambda: bool(pids_of(self.router)), timeout=60)
        time.sleep(self.rng.uniform(*LOADING))
        if self.router._arena.status(0, 0).state is WorkerState.READY:
            return None
        killed_at = self._kill()
        self.loading_kills += killed_at is not None
        return killed_at


def _wait_over(asked: Round, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not asked.is_over and time.monotonic() < deadline:
        time.sleep(0.005)
