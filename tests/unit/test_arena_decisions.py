"""What rank 0 decides and the others read, and the digests by which ranks are compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from backend_lib.arena import MAX_EVENTS, Arena, Decision, Event, RankBehind
from backend_lib.arena.layout import DECISION_BYTES, DECISIONS, DIGESTS
from tests.support.arena import WatchedStores, close, new_arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = new_arena(num_groups=2, num_ranks=3)
    yield arena
    close(arena)


def decision(step: int, count: int = 0) -> Decision:
    return Decision(step, 10 * step, [Event(1, number, 1 << 40) for number in range(count)])


@pytest.mark.parametrize("count", [0, 1, MAX_EVENTS])
def test_a_decision_comes_as_it_was_made(count):
    packed = decision(7, count).pack()
    assert len(packed) == DECISION_BYTES and Decision.unpack(packed) == decision(7, count)


def test_more_events_than_fit_are_refused():
    with pytest.raises(ValueError, match=f"{MAX_EVENTS + 1} events; allowed are {MAX_EVENTS}"):
        decision(1, MAX_EVENTS + 1).pack()


@pytest.mark.parametrize("place", [0, 8, 20, 300, DECISION_BYTES - 1])
def test_a_record_that_is_not_whole_is_none(place):
    packed = bytearray(decision(7, 3).pack())
    packed[place] ^= 1
    assert Decision.unpack(bytes(packed)) is None


def test_each_rank_reads_all_decisions_in_order(arena):
    ring = arena.decisions(1)
    first, second = arena.decisions(1), arena.decisions(1)
    assert first.next(1) is None
    for step in range(1, 4):
        ring.publish(decision(step, step), timeout=0)
    assert [first.next(1) for _ in range(4)] == [decision(1, 1), decision(2, 2), decision(3, 3), None]
    assert second.next(2) == decision(1, 1)
    assert arena.decisions(0).next(1) is None  # another group's


def test_nothing_is_overwritten_that_a_rank_has_not_read(arena):
    ring = arena.decisions(0)
    for step in range(1, DECISIONS + 1):
        ring.publish(decision(step), timeout=0)
    for _ in range(DECISIONS):
        ring.next(1)
    with pytest.raises(RankBehind, match=f"rank 2 is at step 0 of {DECISIONS + 1} and did not move for 0.01 s"):
        ring.publish(decision(DECISIONS + 1), timeout=0.01)
    assert ring.next(2) == decision(1)
    ring.publish(decision(DECISIONS + 1), timeout=0)
    assert ring.next(1) == decision(DECISIONS + 1)


def test_a_record_that_is_only_half_visible_is_read_later(arena):
    ring = arena.decisions(0)
    ring.publish(decision(1), timeout=0)
    at = ring._at(1)
    whole = bytes(arena.memory[at : at + DECISION_BYTES])
    arena.memory[at + 8 : at + 16] = b"\0" * 8
    assert ring.next(1) is None
    arena.memory[at : at + DECISION_BYTES] = whole
    assert ring.next(1) == decision(1)


def test_a_group_that_is_cleared_begins_again(arena):
    arena.decisions(0).publish(decision(1), timeout=0)
    arena.digests(0).write(2, 1, (5,))
    arena.status(0, 2).set_failed("lost")
    arena.status(0, 0).set_port(4000)
    arena.decisions(1).publish(decision(1), timeout=0)
    arena.clear_group(0)
    assert arena.decisions(0).next(1) is None and arena.digests(0).read(2, 1, 1) is None
    assert not arena.status(0, 2).error and not arena.status(0, 0).port
    assert (arena.epoch(0), arena.epoch(1)) == (1, 0)
    arena.decisions(0).publish(decision(1, 2), timeout=0)
    assert arena.decisions(0).next(1) == decision(1, 2)
    assert arena.decisions(1).next(1) == decision(1)


def test_digests_are_kept_for_some_steps(arena):
    digests = arena.digests(1)
    for step in range(1, DIGESTS + 2):
        digests.write(1, step, (step, 2 * step))
    assert digests.read(1, 1, 2) is None  # overwritten
    assert digests.read(1, 2, 2) == (2, 4)
    assert digests.read(1, DIGESTS + 1, 2) == (DIGESTS + 1, 2 * DIGESTS + 2)
    assert digests.read(1, DIGESTS + 2, 2) is None  # not yet
    assert digests.read(2, 2, 2) is None  # another rank's


def test_a_reader_between_any_two_stores_sees_nothing_or_all_of_a_decision(arena):
    ring, seen = arena.decisions(0), set()
    reader = arena.decisions(0)

    def on_store(store) -> None:
        store()
        got = reader.next(1)
        assert got in (None, decision(DECISIONS + 1, 3)), got
        seen.add(got is not None)

    for step in range(1, DECISIONS + 1):
        ring.publish(decision(step, 5), timeout=0)
        reader.next(1), reader.next(2)
    ring._memory, ring._words = WatchedStores(arena.memory, on_store), WatchedStores(arena.words, on_store)
    ring.publish(decision(DECISIONS + 1, 3), timeout=0)
    assert seen == {False, True}


def test_a_reader_between_any_two_stores_sees_no_mixture_of_digests(arena):
    digests, reader = arena.digests(0), arena.digests(0)
    old, new = (1, 2, 3), (4, 5, 6)
    digests.write(0, 1, old)

    def on_store(store) -> None:
        store()
        assert reader.read(0, 1, 3) in (None, old) and reader.read(0, 1 + DIGESTS, 3) in (None, new)

    digests._words = WatchedStores(arena.words, on_store)
    digests.write(0, 1 + DIGESTS, new)
    assert reader.read(0, 1 + DIGESTS, 3) == new
