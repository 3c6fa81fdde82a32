"""Digests of two ranks' states: a difference is found, also by a rank that has been far behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend_lib.arena import Arena
from backend_lib.arena.layout import DIGESTS
from backend_lib.worker.scheduler import Scheduler
from backend_lib.worker.state_check import Disagreement, StateCheck
from tests.support.arena import close, new_arena

IDS = [5, 6]


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = new_arena(num_groups=1, num_ranks=2)
    yield arena
    close(arena)


class Rank:
    def __init__(self, arena: Arena, rank: int) -> None:
        self._scheduler = Scheduler(kv_tokens=8, max_running=2, max_model_len=8, prefill_chunk=8)
        self._check = StateCheck(arena.digests(0), rank)

    def steps(self, count: int, ids: list[int] = IDS) -> None:
        for _ in range(count):
            self._check.check(self._scheduler, ids)


def test_ranks_that_hold_the_same_agree_whoever_is_ahead(arena: Arena) -> None:
    first, second = (Rank(arena, rank) for rank in range(2))
    for ahead, behind in ((5, 3), (0, 2), (3 * DIGESTS, 3 * DIGESTS), (0, 10), (12, 2)):
        first.steps(ahead)
        second.steps(behind)


def test_a_difference_is_named_with_its_step(arena: Arena) -> None:
    first, second = (Rank(arena, rank) for rank in range(2))
    first.steps(2)
    second.steps(1)
    with pytest.raises(Disagreement, match="rank 1 and rank 0 differ after step 2 in ids"):
        second.steps(1, [5, 7])


def test_what_comes_after_a_time_far_behind_is_still_compared(arena: Arena) -> None:
    first, second = (Rank(arena, rank) for rank in range(2))
    first.steps(DIGESTS + 3)  # the first three can be read no more
    second.steps(DIGESTS + 3)
    first.steps(1)
    with pytest.raises(Disagreement, match="in ids"):
        second.steps(1, [5, 7])


def test_a_difference_in_a_step_that_is_not_compared_is_found_later(arena: Arena) -> None:
    first, second = (Rank(arena, rank) for rank in range(2))
    first.steps(DIGESTS + 3)
    second.steps(1, [5, 7])
    with pytest.raises(Disagreement, match="in ids"):
        second.steps(DIGESTS)
