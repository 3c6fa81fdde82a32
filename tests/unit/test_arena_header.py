"""The header and the layout: attaching refuses what it cannot read, changes nothing, and parts do not overlap."""

from __future__ import annotations

import os
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.arena import Arena, ArenaMismatch, ArenaSpec, CommandKind, Load, SlotRef
from backend_lib.arena.layout import CONFIG_OFFSET, HEADER_BYTES, LINE, RECORD_BYTES, SLOT, STATUS_BYTES
from tests.support.arena import SIZES, close, new_arena

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=20,
)
SMALL = st.integers(1, 5)
SPECS = st.builds(
    ArenaSpec, num_groups=SMALL, num_ranks=SMALL, num_slots=SMALL, ring_records=SMALL, dirty_records=SMALL,
    heap_bytes=st.integers(1, 1000),
)  # fmt: skip


@pytest.fixture
def arena():
    arena = new_arena({"model": "tiny", "π": [1, 2.5, None]})
    yield arena
    close(arena)


@given(config=st.dictionaries(st.text(), JSON, max_size=5), spec=SPECS)
@settings(deadline=None)
def test_attach_reads_what_create_wrote(config, spec):
    arena = Arena.create(spec, config)
    attached = Arena.attach(arena.fd)
    assert attached.spec == spec
    assert attached.config == config
    assert len(attached.memory) == os.fstat(arena.fd).st_size == spec.total_bytes
    close(arena)


def test_attaching_writes_nothing(arena):
    arena.ring(0).post(CommandKind.ADMIT, 1, 2, 3)
    arena.dirty_list(1).append([SlotRef(1, 2)])
    arena.status(1, 1).set_load(Load(1, 2, 3, 4, 5, 6, 7, 8))
    before = bytes(arena.memory)
    attached = Arena.attach(arena.fd)
    look_at_everything(attached)
    assert bytes(arena.memory) == before


def look_at_everything(arena: Arena) -> None:
    for group in range(arena.spec.num_groups):
        arena.ring(group).read(0)
        arena.dirty_list(group).drain()
        arena.epoch(group)
        for rank in range(arena.spec.num_ranks):
            status = arena.status(group, rank)
            _ = status.state, status.load, status.error
    for slot in range(len(arena.slots)):
        arena.slots.published(slot, 0)
        arena.slots.client_finish(slot)
    _ = arena.config


def test_two_maps_show_the_same_memory(arena):
    attached = Arena.attach(arena.fd)
    arena.ring(1).post(CommandKind.ADMIT, 1, 2, 3)
    assert [command.argument for command in attached.ring(1).read(0)] == [3]


@pytest.mark.parametrize("content", [b"", b"TAN", b"TANDEM1", b"TANDEM1\0", b"x" * 100, b"\0" * 4096])
def test_attach_refuses_what_is_no_arena(content):
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.flush()
        with pytest.raises(ArenaMismatch):
            Arena.attach(file.fileno())


def test_attach_refuses_a_wrong_magic(arena):
    arena.words[0] += 1
    with pytest.raises(ArenaMismatch, match="holds no Tandem arena"):
        Arena.attach(arena.fd)


def test_attach_refuses_another_version(arena):
    arena.words[1] += 6
    with pytest.raises(ArenaMismatch, match="layout version 10; this build reads version 4"):
        Arena.attach(arena.fd)


@pytest.mark.parametrize("word", range(3, 9))
def test_attach_refuses_other_sizes(arena, word):
    arena.words[word] += 64
    with pytest.raises(ArenaMismatch, match=rf"holds {arena.spec.total_bytes} bytes; its header describes \d+"):
        Arena.attach(arena.fd)


@pytest.mark.parametrize("change", [-1, 1])
def test_attach_refuses_a_block_of_another_length(arena, change):
    os.ftruncate(arena.fd, arena.spec.total_bytes + change)
    with pytest.raises(ArenaMismatch, match="its header describes"):
        Arena.attach(arena.fd)


def test_a_configuration_that_just_fits():
    text = "x" * (HEADER_BYTES - CONFIG_OFFSET - len('{"a": ""}'))
    arena = new_arena({"a": text})
    look_at_everything(arena)
    assert Arena.attach(arena.fd).config == {"a": text}
    assert arena.epoch(0) == 0
    close(arena)
    with pytest.raises(ValueError, match=f"at most {HEADER_BYTES - CONFIG_OFFSET} fit"):
        new_arena({"a": text + "x"})


def test_a_refused_configuration_leaves_no_descriptor_open():
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(ValueError, match="fit"):
        new_arena({"a": "x" * HEADER_BYTES})
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_an_arena_is_not_inherited_unless_passed(arena):
    assert not os.get_inheritable(arena.fd)


def test_an_epoch_belongs_to_its_group(arena):
    arena.set_epoch(1, 2**64 - 1)
    assert (arena.epoch(0), Arena.attach(arena.fd).epoch(1)) == (0, 2**64 - 1)
    assert arena.ring(1).head == 0


def parts(spec: ArenaSpec) -> list[tuple[int, int]]:
    """(offset, bytes) of all that has one writer."""
    found = [(0, HEADER_BYTES), (spec.slots_offset, spec.num_slots * SLOT.itemsize)]
    for group in range(spec.num_groups):
        base, layout = spec.group_offset(group), spec.group
        found += [(base + layout.epoch, LINE), (base + layout.ring_head, LINE)]
        found += [(base + layout.cursors + rank * LINE, LINE) for rank in range(spec.num_ranks)]
        found += [(base + layout.records, RECORD_BYTES * spec.ring_records)]
        found += [(base + layout.dirty, 2 * LINE + 16 * spec.dirty_records)]
        found += [(base + layout.status + rank * STATUS_BYTES, STATUS_BYTES) for rank in range(spec.num_ranks)]
    return sorted([*found, (spec.heap_offset, spec.heap_bytes)])


@given(spec=SPECS)
def test_parts_of_the_arena_do_not_overlap(spec):
    found = parts(spec)
    assert all(offset % LINE == 0 for offset, _ in found)
    assert all(offset + size <= following for (offset, size), (following, _) in pairwise(found))
    assert sum(found[-1]) <= spec.total_bytes


@given(spec=SPECS)
@settings(deadline=None, max_examples=50)
def test_parts_write_inside_themselves(spec):
    """Fill every part through its own interface: each still says what was put into it."""
    arena = Arena.create(spec, {"kept": True})
    groups, ranks = range(spec.num_groups), range(spec.num_ranks)
    readers = [arena.dirty_list(group) for group in groups]
    for group in groups:
        fill_group(arena, group)
    for slot in range(spec.num_slots):
        arena.slots.headers[slot]["error"] = b"\xff" * 212
    arena.memory[spec.heap_offset : spec.total_bytes] = b"\xff" * (spec.total_bytes - spec.heap_offset)
    for group in groups:
        assert arena.epoch(group) == group + 1
        assert [command.slot for command in arena.ring(group).read(0)] == [group] * spec.ring_records
        assert readers[group].drain() == [SlotRef(2**64 - 1, group)] * spec.dirty_records
        assert [arena.status(group, rank).error for rank in ranks] == [f"{group}.{rank}" + "x" * 1021 for rank in ranks]
        assert [arena.status(group, rank).load.recomputed for rank in ranks] == [*ranks]
    assert arena.config == {"kept": True}
    close(arena)


def fill_group(arena: Arena, group: int) -> None:
    arena.set_epoch(group, group + 1)
    for _ in range(arena.spec.ring_records):
        arena.ring(group).post(CommandKind.ADMIT, group, 2**64 - 1, 2**64 - 1)
    arena.dirty_list(group).append([SlotRef(2**64 - 1, group)] * arena.spec.dirty_records)
    for rank in range(arena.spec.num_ranks):
        arena.status(group, rank).set_load(Load(*[2**64 - 1] * 7, rank))
        arena.status(group, rank).set_failed(f"{group}.{rank}" + "x" * 1021)


def test_sizes_of_the_tests_are_sizes():
    assert list(ArenaSpec(**SIZES)) == list(SIZES.values())
