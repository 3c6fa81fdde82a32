"""Brings the metrics to where Triton shows them: one thread, at most once a second, and only what has changed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from backend_lib.arena import Load
from backend_lib.router.metrics import (
    FAMILIES,
    KV_TOKENS,
    PAUSED,
    PAUSES,
    PREFIX_HITS,
    READY,
    RECOMPUTED,
    RUNNING,
    STEP_SECONDS,
    TRT_KV,
    WAITING,
    Family,
    Kind,
    Metrics,
    Series,
)

log = logging.getLogger("tandem")

PERIOD = 1.0  # seconds between two pushes
# Of a period, for observations: each takes about 80 us of the one Triton thread that also answers `is_cancelled`.
OBSERVING_SECONDS = 0.2


class Look(NamedTuple):
    """A group's workers and the router at one moment. `num_streams`: all that wait, run or pause."""

    load: Load
    heartbeat_ns: int
    kv_tokens: int
    num_streams: int
    num_ready: int = 1
    num_workers: int = 1


class Registry(Protocol):
    """Where metrics are shown. Each call may be slow, and raises when metrics are not to be had."""

    def add(self, family: Family) -> None: ...

    def increment(self, series: Series, by: float) -> None: ...

    def set(self, series: Series, number: float) -> None: ...

    def observe(self, series: Series, number: float) -> None: ...

    def close(self) -> None:
        """Give back everything that was added."""


class WorkerCounts:
    """Turns what groups of workers say of themselves into metrics, which are sums over groups. A group's counts begin
    at 0 with its workers: whoever clears them looks before and after.
    """

    def __init__(self, metrics: Metrics, looks: Callable[[], Sequence[Look]]) -> None:
        self._metrics = metrics
        self._looks = looks
        self._lock = threading.Lock()  # around the look too: of two looks the later one must be taken last
        self._last: Sequence[Look] = ()

    def take(self) -> Sequence[Look]:
        """Of each group."""
        with self._lock:
            last, self._last = self._last, (looks := self._looks())
            self._gauges(_sum(looks))
            for before, now in zip(last or map(_uncounted, looks), looks, strict=True):
                self._count(PAUSES, before.load.pauses, now.load.pauses)
                self._count(RECOMPUTED, before.load.recomputed, now.load.recomputed)
                self._step(before, now)
        return looks

    def _count(self, family: Family, before: int, now: int) -> None:
        self._metrics.count(family, now - before if now >= before else now)

    def _gauges(self, look: Look) -> None:
        load, total = look.load, look.kv_tokens
        free = max(0, total - load.kv_used - load.cached)
        self._metrics.set(READY, look.num_ready)
        self._metrics.set(RUNNING, load.running)
        self._metrics.set(PAUSED, load.paused)
        self._metrics.set(WAITING, max(0, look.num_streams - load.running - load.paused))
        for state, tokens in (("used", load.kv_used), ("cached", load.cached), ("free", free)):
            self._metrics.set(KV_TOKENS, tokens, state)
        # Cached prefixes are free in this family: they are there for whoever comes next.
        for name, number in (
            ("max", total), ("used", load.kv_used), ("free", total - load.kv_used), ("tokens_per", 1),
            ("reused", self._metrics.get(PREFIX_HITS)), ("fraction", load.kv_used / total if total else 0),
        ):  # fmt: skip
            self._metrics.set(TRT_KV, number, name)

    def _step(self, last: Look, look: Look) -> None:
        """The mean step since the last look. Only the step count is known, so a second in which the worker may have
        slept says nothing."""
        steps = look.load.step - last.load.step
        if steps > 0 and last.load.running and look.load.running:
            self._metrics.observe(STEP_SECONDS, (look.heartbeat_ns - last.heartbeat_ns) / 1e9 / steps)


def _sum(looks: Sequence[Look]) -> Look:
    """Of loads and counts; there is no heartbeat of all."""
    load = Load(*map(sum, zip(*(look.load for look in looks), strict=True)))
    numbers = (sum(numbers) for numbers in zip(*(look[2:] for look in looks), strict=True))
    return Look(load, 0, *numbers)


def _uncounted(look: Look) -> Look:
    """As if the group had been looked at when it began: all that it has counted is new, and no step is known."""
    return look._replace(load=look.load._replace(pauses=0, recomputed=0))


class Pusher:
    """Owns the registry and the thread that writes to it. When that fails the router works on without metrics.

    `may_begin` is asked until it says yes: only then is the registry touched.
    """

    def __init__(
        self, metrics: Metrics, counts: WorkerCounts, registry: Registry, *, may_begin: Callable[[], bool]
    ) -> None:
        self._metrics = metrics
        self._counts = counts
        self._registry = registry
        self._may_begin = may_begin
        self._pushed: dict[Series, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tandem-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._metrics.touch()
        self._thread.join()
        self._registry.close()

    def push(self) -> bool:
        """Write what has changed. False: nothing had and nothing runs, so the next change is one that will be told."""
        looks = self._counts.take()
        values = self._metrics.snapshot()
        shown = [(family, value) for family in FAMILIES if family.kind is not Kind.HISTOGRAM for value in family.values]
        num_changed = sum(self._write(family, value, values) for family, value in shown)
        is_still = all(look.num_streams == 0 and look.num_ready == look.num_workers for look in looks)
        return self._observe() or num_changed > 0 or not is_still

    def _write(self, family: Family, value: str, values: dict[Series, float]) -> bool:
        series, number = Series(family.name, value), values[Series(family.source.name, value)]
        before = self._pushed.get(series)
        if number == before:
            return False
        if family.kind is Kind.COUNTER:
            self._registry.increment(series, number - (before or 0))
        else:
            self._registry.set(series, number)
        self._pushed[series] = number
        return True

    def _observe(self) -> bool:
        """Write observations, as many as there is time for; whether there were any."""
        deadline, wrote = time.monotonic() + OBSERVING_SECONDS, False
        while time.monotonic() < deadline and (observation := self._metrics.next_observation()):
            source, number = observation
            for family in FAMILIES:
                if family.source is source:
                    self._registry.observe(Series(family.name), number)
            wrote = True
        return wrote

    def _run(self) -> None:
        try:
            if self._begin():
                self._push_for_ever()
        except Exception:
            log.exception("metrics are no longer pushed")

    def _begin(self) -> bool:
        """Show every metric. False when there is nothing to push to."""
        while not self._may_begin():
            if self._closing.wait(PERIOD):
                return False
        try:
            for family in FAMILIES:
                self._registry.add(family)
        except Exception as error:  # Triton's word for a server without metrics differs with its release
            self._registry.close()
            log.warning("no metrics: %s", error)
            return False
        return True

    def _push_for_ever(self) -> None:
        restless = True
        while not self._closing.is_set():
            self._metrics.wait(0 if restless else None)
            restless = self.push()
            self._closing.wait(PERIOD)
