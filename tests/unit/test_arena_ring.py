"""The command ring against a plain list, torn records, and a reader that looks between any two stores."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend_lib.arena import Arena, Command, CommandKind, CommandRing, RingFull
from backend_lib.arena.layout import RECORD_BYTES
from tests.support.arena import close, new_arena, watch_loads, watch_stores

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
FIELDS = st.tuples(st.sampled_from(CommandKind), U32, U64, U64)


@pytest.fixture
def arena():
    arena = new_arena(ring_records=4, num_ranks=2)
    yield arena
    close(arena)


def post_numbers(ring: CommandRing, count: int) -> None:
    for _ in range(count):
        ring.post(CommandKind.ADMIT, ring.head % 7, ring.head + 100, ring.head + 200)


def sequences(commands: list[Command]) -> list[int]:
    return [command.sequence for command in commands]


def record_at(arena: Arena, sequence: int) -> int:
    """First byte of the record of `sequence` in group 0."""
    records = arena.spec.group_offset(0) + arena.spec.group.records
    return records + sequence % arena.spec.ring_records * RECORD_BYTES


def test_a_command_crosses_whole(arena):
    sequence = arena.ring(0).post(CommandKind.ABORT, 2**32 - 1, 2**64 - 1, 2**63)
    assert arena.ring(0).read(1) == [Command(sequence, CommandKind.ABORT, 2**32 - 1, 2**64 - 1, 2**63)]


def test_another_groups_ring_is_untouched(arena):
    arena.ring(0).post(CommandKind.ADMIT, 1, 1)
    assert arena.ring(1).head == 0
    assert arena.ring(1).read(0) == []


def test_reading_does_not_move_the_cursor(arena):
    ring = arena.ring(0)
    post_numbers(ring, 2)
    assert ring.read(0) == ring.read(0)
    ring.advance(0, 1)
    assert sequences(ring.read(0)) == [2]
    assert sequences(ring.read(1)) == [1, 2]


def test_passed_by_all_needs_every_rank(arena):
    ring = arena.ring(0)
    post_numbers(ring, 2)
    ring.advance(0, 2)
    assert not ring.passed_by_all(1)
    ring.advance(1, 1)
    assert ring.passed_by_all(1)
    assert not ring.passed_by_all(2)


@pytest.mark.parametrize("behind", [0, 1])
def test_a_full_ring_names_the_rank_behind(arena, behind):
    ring = arena.ring(0)
    post_numbers(ring, 4)
    ring.advance(1 - behind, 4)
    before = bytes(arena.memory)
    start = time.monotonic()
    with pytest.raises(RingFull, match=rf"rank {behind} has read up to 0 of 4\b"):
        ring.post(CommandKind.ADMIT, 0, 0, timeout=0.02)
    assert 0.02 <= time.monotonic() - start < 2
    assert bytes(arena.memory) == before
    ring.advance(behind, 1)
    assert ring.post(CommandKind.ADMIT, 0, 0, timeout=0.02) == 5


def test_discard_forgets_what_nobody_read(arena):
    ring = arena.ring(0)
    post_numbers(ring, 4)
    ring.advance(1, 2)
    ring.discard()
    assert ring.read(0) == ring.read(1) == []
    post_numbers(ring, 4)
    assert sequences(ring.read(0)) == sequences(ring.read(1)) == [5, 6, 7, 8]


class RingAgainstList(RuleBasedStateMachine):
    """Each rank must be given exactly the tail of one list, which runs ahead by the ring's size at most."""

    @initialize(num_ranks=st.integers(1, 3), num_records=st.integers(1, 5), group=st.integers(0, 1))
    def start(self, num_ranks: int, num_records: int, group: int) -> None:
        self.arena = new_arena(num_ranks=num_ranks, ring_records=num_records)
        self.writer, self.reader = self.arena.ring(group), self.arena.ring(group)
        self.posted: list[Command] = []
        self.cursors = [0] * num_ranks
        self.num_records = num_records

    def is_full(self) -> bool:
        return len(self.posted) - min(self.cursors) == self.num_records

    @precondition(lambda self: not self.is_full())
    @rule(fields=FIELDS)
    def post(self, fields: tuple[CommandKind, int, int, int]) -> None:
        sequence = self.writer.post(*fields, timeout=0)
        self.posted.append(Command(sequence, *fields))
        assert sequence == len(self.posted)

    @precondition(lambda self: self.is_full())
    @rule()
    def post_when_full(self) -> None:
        behind = self.cursors.index(min(self.cursors))
        with pytest.raises(RingFull, match=f"rank {behind} has"):
            self.writer.post(CommandKind.ADMIT, 0, 0, timeout=0)

    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.cursors) - 1))
        self.cursors[rank] = data.draw(st.integers(self.cursors[rank], len(self.posted)))
        self.reader.advance(rank, self.cursors[rank])

    @rule()
    def discard(self) -> None:
        self.writer.discard()
        self.cursors = [len(self.posted)] * len(self.cursors)

    @rule(data=st.data())
    def tear_and_repair(self, data: st.DataObject) -> None:
        """A damaged record hides itself and all after it, and nothing before it."""
        rank = data.draw(st.integers(0, len(self.cursors) - 1))
        unread = self.posted[self.cursors[rank] :]
        if not unread:
            return
        torn = data.draw(st.sampled_from(unread))
        at = record_of(self.reader, torn.sequence) + data.draw(st.sampled_from(COVERED_BYTES))
        self.arena.memory[at] ^= 1 << (bit := data.draw(st.integers(0, 7)))
        assert self.reader.read(rank) == [command for command in unread if command.sequence < torn.sequence]
        self.arena.memory[at] ^= 1 << bit
        assert self.reader.read(rank) == unread

    @invariant()
    def every_rank_reads_its_tail_of_the_list(self) -> None:
        assert self.reader.head == len(self.posted)
        for rank, cursor in enumerate(self.cursors):
            assert self.reader.cursor(rank) == cursor
            assert self.reader.read(rank) == self.posted[cursor:]

    def teardown(self) -> None:
        close(self.arena)


COVERED_BYTES = [*range(32), *range(56, 64)]  # sequence, payload, CRC; the rest of a record means nothing yet


def record_of(ring: CommandRing, sequence: int) -> int:
    return ring._records + sequence % ring._num_records * RECORD_BYTES


TestRingAgainstList = RingAgainstList.TestCase
TestRingAgainstList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("damaged", COVERED_BYTES)
def test_any_damaged_byte_means_not_yet(arena, damaged):
    ring = arena.ring(0)
    post_numbers(ring, 3)
    at = record_at(arena, 2) + damaged
    arena.memory[at] ^= 0x40
    assert sequences(ring.read(0)) == [1]
    arena.memory[at] ^= 0x40
    assert sequences(ring.read(0)) == [1, 2, 3]


def test_a_record_of_another_lap_is_not_read(arena):
    """Whole and with a right CRC, but a lap old: as when the head is seen before the record."""
    ring = arena.ring(0)
    post_numbers(ring, 1)
    ring.discard()
    arena.words[ring._head] = 5
    ring.advance(0, 4)
    assert ring.read(0) == []


def test_a_new_sequence_over_an_old_payload_is_not_read(arena):
    """The CRC covers the sequence too: the payload of the last lap does not pass under this lap's number."""
    ring = arena.ring(0)
    post_numbers(ring, 1)
    ring.discard()
    arena.words[record_at(arena, 5) // 8] = arena.words[ring._head] = 5
    ring.advance(0, 4)
    assert ring.read(0) == []


def test_a_record_changed_during_the_read_is_not_read(arena):
    """The sequence is looked at again after the payload."""
    ring, writer = arena.ring(0), arena.ring(0)
    post_numbers(writer, 1)
    loads = iter(range(100))
    sequence_word = record_at(arena, 1) // 8

    def spoil() -> None:
        if next(loads) == 5:  # cursor, head, sequence, payload, crc; before the second look at the sequence
            arena.words[sequence_word] = 9

    watch_loads(ring, spoil)
    assert ring.read(0) == []


@given(posts=st.lists(FIELDS, min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_a_reader_between_any_two_stores_sees_whole_records_only(posts):
    """x86-64 shows stores in program order. So at every store, what the head covers must be readable, and no more."""
    arena = new_arena(ring_records=2, num_ranks=1)
    writer, reader = arena.ring(0), arena.ring(0)
    commands = [Command(sequence, *fields) for sequence, fields in enumerate(posts, start=1)]

    def look_after(store) -> None:
        store()
        assert reader.read(0) == commands[reader.cursor(0) : reader.head]

    watch_stores(writer, look_after)
    for command in commands:
        writer.post(*command[1:])
        assert reader.head == command.sequence
        reader.advance(0, command.sequence - 1)  # one record stays unread, and the next lap must spare it
    close(arena)


@given(
    unread=st.integers(0, 3),
    posts=st.lists(FIELDS, min_size=1, max_size=3),
    pace=st.lists(st.integers(0, 4), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_stores_between_the_loads_of_a_read(unread, posts, pace):
    """The writer's stores happen, in order, between any loads of a reader: it reads a whole prefix."""
    arena = new_arena(ring_records=8, num_ranks=1)
    writer, reader = arena.ring(0), arena.ring(0)
    post_numbers(writer, 6)
    writer.advance(0, 6)
    post_numbers(writer, unread)
    known = writer.read(0)
    stores = captured_stores(writer, posts)
    expected = known + [Command(7 + unread + place, *fields) for place, fields in enumerate(posts)]
    steps = iter(pace)

    def some_stores() -> None:
        for store in stores[: next(steps, 0)]:
            store()
            stores.remove(store)

    watch_loads(reader, some_stores)
    seen = reader.read(0)
    assert len(seen) >= len(known)
    assert seen == expected[: len(seen)]
    for store in stores:
        store()
    assert arena.ring(0).read(0) == expected
    close(arena)


def captured_stores(writer: CommandRing, posts: list[tuple[CommandKind, int, int, int]]) -> list:
    """The stores that posting makes, undone: each can be made again by calling it."""
    arena_before = bytes(writer._memory)
    memory, stores = writer._memory, []

    def keep(store) -> None:
        stores.append(store)
        store()

    watch_stores(writer, keep)
    for fields in posts:
        writer.post(*fields)
    memory[:] = arena_before
    return stores
