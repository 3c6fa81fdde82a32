"""The metrics' arithmetic against a registry that only remembers, and the request log."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import pytest

from backend_lib.arena import Load
from backend_lib.request import FinishReason
from backend_lib.router import metrics_pusher
from backend_lib.router.finished import Finished, Times, refused
from backend_lib.router.metrics import (
    FAMILIES,
    FINISHED,
    GENERATION_TOKENS,
    KV_TOKENS,
    MAX_OBSERVATIONS,
    PAUSES,
    READY,
    RECOMPUTED,
    REFUSED,
    RUNNING,
    STEP_SECONDS,
    TRT_KV,
    TTFT,
    WAITING,
    Family,
    Kind,
    Metrics,
    Series,
    metrics_table,
)
from backend_lib.router.metrics_pusher import Look, Pusher, WorkerCounts
from backend_lib.router.reply import ErrorKind

ROOT = Path(__file__).parents[2]
SECOND = 1_000_000_000
IDLE = Look(Load(step=0, running=0, waiting=0, paused=0, kv_used=0, cached=0, pauses=0, recomputed=0), 0, 100, 0)


class FakeRegistry:
    """Remembers what it is told. `broken` fails at the family of that name."""

    def __init__(self, broken: str = "") -> None:
        self.values: dict[Series, float] = {}
        self.observed: dict[str, list[float]] = {}
        self.families: list[Family] = []
        self.calls = 0
        self.closed = 0
        self._broken = broken

    def add(self, family: Family) -> None:
        if family.name == self._broken:
            raise RuntimeError("metrics not supported")
        self.families.append(family)

    def increment(self, series: Series, by: float) -> None:
        assert by >= 0
        self.calls += 1
        self.values[series] = self.values.get(series, 0) + by

    def set(self, series: Series, number: float) -> None:
        self.calls += 1
        self.values[series] = number

    def observe(self, series: Series, number: float) -> None:
        self.calls += 1
        self.observed.setdefault(series.family, []).append(number)

    def close(self) -> None:
        self.closed += 1


class Rig:
    """A pusher whose worker says what the test sets."""

    made: ClassVar[list[Rig]] = []

    def __init__(self, registry: FakeRegistry | None = None) -> None:
        self.made.append(self)
        self.look = IDLE
        self.metrics = Metrics()
        self.counts = WorkerCounts(self.metrics, lambda: [self.look])
        self.registry = registry or FakeRegistry()
        self.may_begin = False

    @cached_property
    def pusher(self) -> Pusher:
        return Pusher(self.metrics, self.counts, self.registry, may_begin=lambda: self.may_begin)

    def start(self) -> None:
        self.may_begin = True
        assert self.pusher
        wait_until(lambda: self.registry.calls > 0)

    def says(self, *, seconds: float = 0, streams: int = 0, **load: int) -> None:
        self.look = Look(IDLE.load._replace(**load), int(seconds * SECOND), 100, streams)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def finished(finish: FinishReason = FinishReason.LENGTH, error: ErrorKind | None = None, **times: int) -> Finished:
    base = {"arrival": 1, "scheduled": 2, "first_token": 3, "last_token": 7, "end": 9}
    stages = {name: number * SECOND for name, number in (base | times).items()}
    return Finished("id", finish, error, 10, 4, 5, Times(**stages))


def test_only_what_changed_is_written() -> None:
    rig = Rig()
    rig.pusher.push()
    rig.registry.calls = 0
    assert not rig.pusher.push()
    assert rig.registry.calls == 0
    rig.metrics.count(GENERATION_TOKENS, 3)
    rig.metrics.count(GENERATION_TOKENS, 4)
    assert rig.pusher.push()
    assert rig.registry.calls == 2, "ours and vLLM's"
    assert rig.registry.values[Series("vllm:generation_tokens_total")] == 7


def test_a_worker_that_is_replaced_is_shown_as_such_until_the_next_one_is_ready() -> None:
    rig = Rig()
    shown = []
    for ready in (True, False, True):
        rig.look = IDLE._replace(num_ready=int(ready))
        assert rig.pusher.push() or ready
        shown.append(rig.registry.values[Series(READY.name)])
    assert shown == [1, 0, 1]


def test_groups_are_added_up_and_counted_apart() -> None:
    """A group that begins again counts from 0, while the others count on."""
    metrics, looks = Metrics(), [IDLE, IDLE]
    counts = WorkerCounts(metrics, lambda: list(looks))

    def say(*loads: dict[str, int], ready: tuple[int, int] = (2, 2)) -> None:
        looks[:] = [
            Look(IDLE.load._replace(**load), 0, 100, 3, num_ready=number, num_workers=2)
            for load, number in zip(loads, ready, strict=True)
        ]
        counts.take()

    say({"pauses": 5, "running": 2, "kv_used": 30}, {"pauses": 10, "running": 1, "cached": 20})
    assert (metrics.get(RUNNING), metrics.get(WAITING), metrics.get(READY)) == (3, 3, 4)
    assert [metrics.get(KV_TOKENS, state) for state in KV_TOKENS.values] == [30, 20, 150]
    assert metrics.get(TRT_KV, "max") == 200 and metrics.get(TRT_KV, "fraction") == 30 / 200
    say({}, {"pauses": 10, "running": 1}, ready=(0, 2))
    assert (metrics.get(PAUSES), metrics.get(READY)) == (15, 2)
    say({"pauses": 1}, {"pauses": 12})
    assert metrics.get(PAUSES) == 18


def test_a_step_is_observed_of_each_group() -> None:
    metrics = Metrics()
    looks = [Look(IDLE.load._replace(step=10, running=1), 0, 100, 1)] * 2
    counts = WorkerCounts(metrics, lambda: looks)
    counts.take()
    looks = [Look(look.load._replace(step=10 + by), SECOND, 100, 1) for look, by in zip(looks, (10, 4), strict=True)]
    counts.take()
    assert [metrics.next_observation() for _ in range(3)] == [(STEP_SECONDS, 0.1), (STEP_SECONDS, 0.25), None]


def test_the_pusher_goes_on_while_a_worker_of_any_group_is_not_ready() -> None:
    rig = Rig()
    rig.counts._looks = lambda: [IDLE, IDLE._replace(num_ready=1, num_workers=2)]
    rig.pusher.push()
    assert rig.pusher.push()


def test_gauges_follow_the_worker() -> None:
    rig = Rig()
    rig.says(running=2, paused=1, waiting=3, kv_used=30, cached=20, streams=9)
    assert rig.pusher.push(), "while streams live there is more to come"
    values = rig.registry.values
    assert (values[Series(RUNNING.name)], values[Series(WAITING.name)]) == (2, 6)
    assert [values[Series(KV_TOKENS.name, state)] for state in KV_TOKENS.values] == [30, 20, 50]
    assert [values[Series(TRT_KV.name, kind)] for kind in TRT_KV.values] == [100, 70, 30, 1, 0, 0.3]


def test_a_workers_counts_go_on_with_the_next_worker() -> None:
    rig = Rig()
    for pauses in (2, 5, 0, 1, 4):  # a death after the 5
        rig.look = IDLE._replace(load=IDLE.load._replace(pauses=pauses, recomputed=10 * pauses))
        rig.counts.take()
    assert rig.metrics.get(PAUSES) == 9
    assert rig.metrics.get(RECOMPUTED) == 90


def test_a_step_is_the_mean_since_the_last_look() -> None:
    rig = Rig()
    for seconds, step, running in ((1, 10, 0), (2, 20, 3), (4, 30, 3), (5, 40, 0), (6, 50, 2), (7, 5, 2)):
        rig.says(seconds=seconds, step=step, running=running, streams=running)
        rig.counts.take()
    rig.pusher.push()
    assert rig.registry.observed == {STEP_SECONDS.name: [0.2]}, "not where it was idle, nor across a restart"


@pytest.mark.parametrize("finish", [reason for reason in FinishReason if reason])
def test_every_end_has_a_counter(finish: FinishReason) -> None:
    metrics = Metrics()
    finished(finish).add_to(metrics)
    assert sum(metrics.get(FINISHED, value) for value in FINISHED.values) == 1


def test_a_request_is_observed_once_under_each_name() -> None:
    rig = Rig()
    finished().add_to(rig.metrics)
    rig.pusher.push()
    observed = {name: numbers for name, (*numbers,) in rig.registry.observed.items()}
    assert observed == {
        "tandem_queue_seconds": [1],
        "tandem_time_to_first_token_seconds": [2],
        "tandem_inter_token_seconds": [1],
        "tandem_e2e_seconds": [8],
        "vllm:time_to_first_token_seconds": [2],
        "vllm:time_per_output_token_seconds": [1],
        "vllm:e2e_request_latency_seconds": [8],
        "vllm:request_prompt_tokens": [10],
        "vllm:request_generation_tokens": [5],
        "vllm:request_params_n": [1],
    }


def test_a_request_that_ended_early_is_observed_as_far_as_it_came() -> None:
    rig = Rig()
    finished(FinishReason.CANCELLED, ErrorKind.CANCELLED, first_token=0).add_to(rig.metrics)
    rig.pusher.push()
    times = {name for name in rig.registry.observed if name.endswith("_seconds")}
    assert times == {"tandem_queue_seconds"}


def test_observations_do_not_pile_up() -> None:
    metrics = Metrics()
    for number in range(MAX_OBSERVATIONS + 5):
        metrics.observe(TTFT, number)
    assert metrics.next_observation() == (TTFT, 5)


def test_a_flood_of_observations_is_written_bit_by_bit(monkeypatch) -> None:
    monkeypatch.setattr(metrics_pusher, "OBSERVING_SECONDS", 0.02)
    rig = Rig(registry := FakeRegistry())
    monkeypatch.setattr(registry, "observe", lambda series, number: time.sleep(0.001))
    for _ in range(1000):
        rig.metrics.observe(TTFT, 1.0)
    started = time.monotonic()
    assert rig.pusher.push(), "there is more"
    assert time.monotonic() - started < 0.5
    assert rig.metrics.next_observation()


@pytest.fixture(autouse=True)
def fast(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(metrics_pusher, "PERIOD", 0.02)
    yield
    while Rig.made:
        Rig.made.pop().pusher.close()


def test_a_server_without_metrics_leaves_nothing_in_the_registry(caplog) -> None:
    rig = Rig(FakeRegistry(broken=FAMILIES[3].name))
    rig.may_begin = True
    rig.pusher._thread.join(5)
    assert rig.registry.closed == 1
    assert "no metrics: metrics not supported" in caplog.text
    rig.pusher.close()


def test_nothing_is_registered_before_it_may_begin() -> None:
    rig = Rig()
    assert rig.pusher
    time.sleep(0.1)
    assert not rig.registry.families
    rig.start()
    assert len(rig.registry.families) == len(FAMILIES)
    rig.pusher.close()
    waiting = Rig()
    waiting.pusher.close()
    assert not waiting.registry.families and waiting.registry.closed == 1


def test_the_thread_sleeps_while_nothing_changes_and_ends_when_closed(monkeypatch) -> None:
    rig = Rig()
    looks: list[int] = []
    monkeypatch.setattr(rig.counts, "_looks", lambda: looks.append(1) or [rig.look])
    rig.start()
    time.sleep(0.2)
    assert len(looks) == 2, "all is new, and then nothing"
    rig.metrics.count(REFUSED, value="invalid")
    wait_until(lambda: rig.registry.values.get(Series(REFUSED.name, "invalid")) == 1)
    time.sleep(0.2)
    before = len(looks)
    time.sleep(0.1)
    assert len(looks) == before
    rig.pusher.close()
    assert rig.registry.closed == 1
    assert "tandem-metrics" not in {thread.name for thread in threading.enumerate()}


def test_a_registry_that_fails_later_does_not_take_the_rest_with_it(monkeypatch, caplog) -> None:
    rig = Rig()
    rig.start()
    monkeypatch.setattr(rig.registry, "increment", lambda series, by: 1 / 0)
    rig.metrics.count(REFUSED, value="invalid")
    rig.pusher._thread.join(5)
    assert "metrics are no longer pushed" in caplog.text
    rig.pusher.close()


def test_many_threads_count(monkeypatch) -> None:
    metrics = Metrics()
    threads = [
        threading.Thread(target=lambda: [metrics.count(GENERATION_TOKENS) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.get(GENERATION_TOKENS) == 8000


def test_the_log_line_is_json_with_the_stages_that_were_reached(caplog) -> None:
    caplog.set_level(logging.INFO)
    finished(FinishReason.DEADLINE, ErrorKind.UNAVAILABLE, scheduled=0, first_token=0).log()
    refused(Metrics(), "x" * 1000 + '"\n', "queue_full", ErrorKind.UNAVAILABLE)
    first, second = (json.loads(record.getMessage()) for record in caplog.records)
    assert first == {
        "request": "id",
        "finish": "deadline",
        "error": "UNAVAILABLE",
        "input_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 5,
        "e2e_ms": 8000,
    }
    assert second == {"request": "x" * 128, "finish": "refused", "error": "UNAVAILABLE", "refused": "queue_full"}


def test_the_table_is_sound() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.help and bool(family.buckets) == (family.kind is Kind.HISTOGRAM)
        assert list(family.buckets) == sorted(set(family.buckets))
        assert family.source in FAMILIES and family.source.values == family.values
        assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)


def test_the_document_has_the_table() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    table = text.partition("<!-- metrics: begin -->\n")[2].partition("\n<!-- metrics: end -->")[0]
    assert table == metrics_table()
