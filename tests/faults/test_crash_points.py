"""A worker ends at every named point of its life, one after the other, under load: every answer is still exact."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from backend_lib.router.router import Router
from backend_lib.worker.crash_points import POINTS
from tests.support.checkpoints import make_hash_checkpoint
from tests.support.engine import EOS, VOCAB, Ask, assert_level, random_prompt, running_router, wait_until

# Eight run, and seldom all of their outputs fit: some are paused. Prompts take several chunks.
BEFORE = POINTS[: POINTS.index("commands read")]  # the first request
OF_SEVERAL = ("joined", "decided")
OF_RANK_0 = ("commands read", "decided", "half published", "published", "listed")
SETTINGS = {"max_running": 8, "kv_tokens": 700, "prefill_chunk": 32}
IN_FLIGHT = 16


@pytest.fixture
def folder(tmp_path):
    return make_hash_checkpoint(tmp_path / "hash", vocab_size=VOCAB, eos_token_id=EOS, max_position=512)


def mixed_asks(rng: random.Random) -> Iterator[Ask]:
    prefix = random_prompt(rng, 40, 40)
    for number in itertools.count():
        prompt = prefix * (number % 3 == 0) + random_prompt(rng, 1, 90)
        parameters = {"max_tokens": rng.choice([1, 40, 150]), "stream": rng.random() < 0.7}
        if number % 4 == 1:
            parameters |= {"temperature": 4.0, "seed": rng.getrandbits(64)}
        if number % 4 == 2:
            parameters |= {"ignore_eos": True, "stop_token_ids": [9]}
        if number % 7 == 5:
            parameters |= {"min_tokens": 30, "max_tokens": 60}
        yield Ask(prompt, parameters)


def sweep(router: Router, asks: Iterator[Ask], deaths: int) -> int:
    """Keep the router loaded until so many workers have died, and check each answer; how many there were."""
    epoch = lambda: router._arena.epoch(0)  # noqa: E731
    in_flight: list[Ask] = []
    answers = 0
    while epoch() < deaths:
        while len(in_flight) < IN_FLIGHT:
            in_flight.append(next(asks))
            router.submit(in_flight[-1].inbound())
        before = epoch()
        wait_until(lambda before=before: in_flight[0].sender.done.is_set() or epoch() > before)
        done = [ask for ask in in_flight if ask.sender.done.is_set()]
        for ask in done:
            ask.check(timeout=0)
            in_flight.remove(ask)
        answers += len(done)
    for ask in in_flight:
        ask.check()
    return answers + len(in_flight)


def lives(times: int, points: tuple[str, ...]) -> list[tuple[str, int]]:
    """The point at which each worker ends, and how often it passes there. The first worker must come up.

    Where the first passing ends it, every other life is one that publishes tokens: else a request would be in three
    deaths without a token, and be failed for it.
    """
    start = points.index(next(point for point in points if point not in BEFORE))
    found = []
    for point in points[start:] + points[:start]:
        if times == 1:
            found.append(("sampled", 40))
        found.append((point, 1 if point in BEFORE else times))
    return found


@pytest.mark.parametrize("overlap", ["off", pytest.param("on", marks=pytest.mark.long)])
@pytest.mark.parametrize("times", [7, pytest.param(1, marks=pytest.mark.long)])
def test_a_death_at_any_point_changes_no_answer(folder, monkeypatch, overlap: str, times: int) -> None:
    plan = lives(times, tuple(point for point in POINTS if point not in OF_SEVERAL))
    deaths = [f"{epoch}:{point}:{passings}" for epoch, (point, passings) in enumerate(plan)]
    monkeypatch.setenv("TANDEM_CRASH_POINTS", ",".join(deaths))
    with running_router(folder, overlap=overlap, **SETTINGS) as router:
        answers = sweep(router, mixed_asks(random.Random(times)), deaths=len(plan))
        assert answers > IN_FLIGHT and router._arena.epoch(0) == len(plan)
        assert_level(router)


@pytest.mark.long
@pytest.mark.parametrize(("agreement", "overlap"), [("arena", "off"), ("broadcast", "on")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_of_one_rank_at_any_point_changes_no_answer(folder, monkeypatch, rank, agreement, overlap) -> None:
    plan = lives(7, POINTS if rank == 0 else tuple(point for point in POINTS if point not in OF_RANK_0))
    deaths = [f"{epoch}.{rank}:{point}:{passings}" for epoch, (point, passings) in enumerate(plan)]
    monkeypatch.setenv("TANDEM_CRASH_POINTS", ",".join(deaths))
    several = {"tensor_parallel": 2, "agreement": agreement, "overlap": overlap, "debug": "on"}
    with running_router(folder, **several, **SETTINGS) as router:
        sweep(router, mixed_asks(random.Random(rank)), deaths=len(plan))
        assert router._arena.epoch(0) == len(plan)
        assert_level(router)
