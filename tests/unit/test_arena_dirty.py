"""The dirty list against a plain list, and a writer that comes round while the router copies."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from backend_lib.arena import DirtyList, SlotRef
from tests.support.arena import close, new_arena, watch_loads, watch_stores

REFS = st.builds(SlotRef, slot=st.integers(0, 2**32 - 1), generation=st.integers(0, 2**64 - 1))
SIZE = 4


@pytest.fixture
def arena():
    arena = new_arena(dirty_records=SIZE)
    yield arena
    close(arena)


def numbered(first: int, count: int) -> list[SlotRef]:
    """Refs that are told apart by their generation; slots repeat, as they do step after step."""
    return [SlotRef(place % 3, place) for place in range(first, first + count)]


def test_groups_do_not_share_a_list(arena):
    arena.dirty_list(0).append([SlotRef(1, 1)])
    assert arena.dirty_list(1).drain() == []


def test_a_list_opened_late_starts_at_the_end(arena):
    arena.dirty_list(0).append(numbered(0, 3))
    reader = arena.dirty_list(0)
    arena.dirty_list(0).append(numbered(3, 1))
    assert reader.drain() == numbered(3, 1)


@pytest.mark.parametrize("count", [0, 1, SIZE, SIZE + 1, 3 * SIZE])
def test_one_append_of_any_length(arena, count):
    reader = arena.dirty_list(0)
    arena.dirty_list(0).append(numbered(0, count))
    assert reader.drain() == (numbered(0, count) if count <= SIZE else None)
    assert reader.drain() == []


class DirtyAgainstList(RuleBasedStateMachine):
    """`drain` gives what was appended since the last one, in order, or None exactly when that was more than fits."""

    @initialize(size=st.integers(1, 6))
    def start(self, size: int) -> None:
        self.arena = new_arena(dirty_records=size)
        self.writer, self.reader = self.arena.dirty_list(1), self.arena.dirty_list(1)
        self.size = size
        self.pending: list[SlotRef] = []

    @rule(refs=st.lists(REFS, max_size=4))
    def append(self, refs: list[SlotRef]) -> None:
        self.writer.append(refs)
        self.pending += refs

    @rule()
    def drain(self) -> None:
        assert self.reader.drain() == (self.pending if len(self.pending) <= self.size else None)
        self.pending = []

    def teardown(self) -> None:
        close(self.arena)


TestDirtyAgainstList = DirtyAgainstList.TestCase
TestDirtyAgainstList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def captured_stores(arena, appends: list[list[SlotRef]]) -> list:
    """The stores that the appends make, in order and undone: each can be made again by calling it."""
    writer, before, stores = arena.dirty_list(0), bytes(arena.memory), []

    def keep(store) -> None:
        stores.append(store)
        store()

    watch_stores(writer, keep)
    for refs in appends:
        writer.append(refs)
    arena.memory[:] = before
    return stores


def between_loads(reader: DirtyList, stores: list, pace: list[int]) -> None:
    """Before each load of the reader, some of the stores happen; x86-64 shows them in program order."""
    steps = iter(pace)

    def some_stores() -> None:
        for _ in range(min(next(steps, 0), len(stores))):
            stores.pop(0)()

    watch_loads(reader, some_stores)


def check_drains(drains: list[list[SlotRef] | None], appended: list[SlotRef]) -> None:
    """What was drained stands in order at its own place; a gap is allowed only where a drain said that it lost some."""
    place, lost = 0, False
    for refs in drains:
        if refs:
            assert refs[0].generation >= place
            place = refs[0].generation if lost else place
            assert refs == appended[place : place + len(refs)]
            place += len(refs)
        lost = refs is None or (lost and not refs)
    assert lost or place == len(appended)


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    pace=st.lists(st.integers(0, 9), max_size=60),
)
@example(counts=[5, 5, 1, 1], pace=[0, 0, 0, 6, 9, 9, 4])
@settings(max_examples=400, deadline=None)
def test_stores_between_the_loads_of_drains(counts, pace):
    arena = new_arena(dirty_records=SIZE)
    appends = [numbered(sum(counts[:step]), count) for step, count in enumerate(counts)]
    reader, stores = arena.dirty_list(0), captured_stores(arena, appends)
    between_loads(reader, stores, pace)
    drains = [reader.drain() for _ in range(4)]
    while stores:
        stores.pop(0)()  # each happens once: the last drain must not repeat one
    drains.append(reader.drain())
    check_drains(drains, numbered(0, sum(counts)))
    close(arena)


@pytest.mark.parametrize("late", range(1, 12))
def test_the_writer_comes_round_before_the_copy(arena, late):
    """A full list whose first entry is overwritten at some point of the copy: the entries as they were, or None."""
    reader = arena.dirty_list(0)
    arena.dirty_list(0).append(numbered(0, SIZE))
    stores = captured_stores(arena, [numbered(SIZE, 2)])
    between_loads(reader, stores, [0] * late + [len(stores) - 1])  # all but the last: the head has not moved yet
    refs = reader.drain()
    assert refs is None or refs == numbered(0, SIZE)
    assert (refs is None) == (late <= 2 * SIZE + 1)  # told before the last look at `reserved`


def test_entries_that_the_writer_spared_are_kept(arena):
    """The writer runs during the copy but only into free places: nothing is lost."""
    reader = arena.dirty_list(0)
    arena.dirty_list(0).append(numbered(0, SIZE - 2))
    stores = captured_stores(arena, [numbered(SIZE - 2, 2)])
    between_loads(reader, stores, [0, len(stores)])
    assert reader.drain() == numbered(0, SIZE - 2)
    assert reader.drain() == numbered(SIZE - 2, 2)


def test_at_every_store_the_reader_sees_whole_appends(arena):
    """The head comes last: a reader between any two stores drains all of an append or none of it."""
    writer, reader = arena.dirty_list(0), arena.dirty_list(0)
    wanted = [[], numbered(0, 1), numbered(1, 3), numbered(4, 2)]
    seen: list[list[SlotRef]] = []

    def look_after(store) -> None:
        store()
        seen.append(reader.drain())

    watch_stores(writer, look_after)
    for refs in wanted:
        writer.append(refs)
    assert [refs for refs in seen if refs] == wanted[1:]
