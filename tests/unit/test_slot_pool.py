"""Slots are not handed out again while a rank may still read a command that names them."""

from __future__ import annotations

import pytest

from backend_lib.arena import CommandKind, SlotRef
from backend_lib.router.slot_pool import SlotPool
from tests.support.arena import close, new_arena


@pytest.fixture
def ring():
    arena = new_arena(num_groups=1, num_ranks=2)
    yield arena.ring(0)
    close(arena)


def one(pool: SlotPool) -> SlotRef:
    """The slot that is handed out next."""
    (taken,) = pool.acquire()
    return taken


def test_every_slot_once_each_time_under_a_new_generation(ring) -> None:
    pool = SlotPool(3)
    assert [one(pool) for _ in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert pool.acquire() is None
    pool.retire(1, ring, 0)
    assert one(pool) == (1, 4)


def test_the_longest_unused_comes_first(ring) -> None:
    pool = SlotPool(3)
    for slot, _ in [one(pool), one(pool)]:
        pool.retire(slot, ring, 0)
    assert [one(pool)[0] for _ in range(3)] == [2, 0, 1]


def test_a_slot_comes_back_when_every_rank_has_passed_its_last_command(ring) -> None:
    pool = SlotPool(1)
    slot, generation = one(pool)
    ring.post(CommandKind.ADMIT, slot, generation)
    last = ring.post(CommandKind.ABORT, slot, generation)
    pool.retire(slot, ring, last)
    for rank, sequence in [(0, 1), (0, 2), (1, 1)]:
        ring.advance(rank, sequence)
        assert pool.acquire() is None
    ring.advance(1, 2)
    assert one(pool) == (slot, generation + 1)


def test_one_that_must_wait_does_not_keep_others(ring) -> None:
    pool = SlotPool(2)
    first, second = one(pool), one(pool)
    pool.retire(first[0], ring, ring.post(CommandKind.ABORT, *first))
    pool.retire(second[0], ring, 0)
    assert one(pool)[0] == second[0]
    assert pool.acquire() is None


def test_several_are_granted_together_or_not_at_all():
    pool = SlotPool(3)
    assert pool.acquire(2) == [(0, 1), (1, 2)]
    assert pool.acquire(2) is None
    assert pool.acquire(1) == [(2, 3)]
    assert pool.acquire(0) == []
