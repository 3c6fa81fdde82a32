"""When requests are sent: closed loop (a number of clients) or open loop (a rate), and for how long."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.serving.client import Trace
from benchmarks.serving.workload import LoadRequest

Ask = Callable[[LoadRequest, float], Awaitable[Trace]]  # the second is when it was to be sent


class Level(NamedTuple):
    """`value` clients at a time, or `value` requests a second."""

    kind: str  # "concurrency" or "rate"
    value: float

    def __str__(self) -> str:
        return f"{self.kind} {self.value:g}"


@dataclass(frozen=True)
class Extent:
    """How much is sent: a number of requests, or whatever begins within so many seconds. One of them is None."""

    requests: int | None
    seconds: float | None


async def run_load(
    level: Level, extent: Extent, requests: Iterator[LoadRequest], ask: Ask, *, max_outstanding: int, seed: int
) -> list[Trace]:
    """Send until the extent is reached and wait for the answers."""
    if level.kind == "concurrency":
        return await _closed_loop(int(level.value), extent, requests, ask)
    return await _open_loop(poisson_arrivals(level.value, seed), extent, requests, ask, max_outstanding)


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which requests arrive, `rate` a second on average, independently of each other."""
    rng, now = random.Random(f"{seed}/{rate}"), 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


async def _closed_loop(clients: int, extent: Extent, requests: Iterator[LoadRequest], ask: Ask) -> list[Trace]:
    """Each client sends its next request when it has the answer to the last."""
    started, numbers, traces = time.perf_counter(), iter(_numbers(extent)), []

    async def one_client() -> None:
        # All clients take from the same iterators, so that together they send the extent.
        while not _is_over(extent, started) and next(numbers, None) is not None:
            traces.append(await ask(next(requests), time.perf_counter()))

    await asyncio.gather(*(one_client() for _ in range(clients)))
    return traces


async def _open_loop(
    arrivals: Iterator[float], extent: Extent, requests: Iterator[LoadRequest], ask: Ask, max_outstanding: int
) -> list[Trace]:
    """A request is sent when it arrives, however many are unanswered, up to `max_outstanding`; then it waits."""
    started, tasks, places = time.perf_counter(), [], asyncio.Semaphore(max_outstanding)

    async def sent(request: LoadRequest, planned: float) -> Trace:
        try:
            return await ask(request, planned)
        finally:
            places.release()

    for _, arrival in zip(_numbers(extent), arrivals, strict=False):
        request = next(requests)
        await asyncio.sleep(started + min(arrival, extent.seconds or math.inf) - time.perf_counter())
        await places.acquire()
        if _is_over(extent, started):
            break
        tasks.append(asyncio.create_task(sent(request, started + arrival)))
    return list(await asyncio.gather(*tasks))


def _numbers(extent: Extent) -> Iterator[int]:
    """As many as may be sent; without end when time is the limit."""
    number = 0
    while extent.requests is None or number < extent.requests:
        yield number
        number += 1


def _is_over(extent: Extent, started: float) -> bool:
    return extent.seconds is not None and time.perf_counter() - started >= extent.seconds
