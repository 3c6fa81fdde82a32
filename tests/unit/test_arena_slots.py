"""Slots: every field has a place of its own, and one word says what rank 0 has produced."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_lib.arena import Published
from backend_lib.arena.layout import CLIENT_FINISH_WORD, GENERATION_WORD, LINE, PUBLISHED_WORD, SLOT
from backend_lib.request import FinishReason
from tests.support.arena import close, new_arena

NAMES = list(SLOT.names)
FIRST_OF_WORKER = NAMES.index("published")
ROUTER_FIELDS, WORKER_FIELDS = NAMES[:FIRST_OF_WORKER], NAMES[FIRST_OF_WORKER:]
REASONS = st.sampled_from(FinishReason)
U64 = st.integers(0, 2**64 - 1)


@pytest.fixture(scope="module")
def arena():
    arena = new_arena(num_slots=4)
    yield arena
    close(arena)


def extent_of(name: str) -> tuple[int, int]:
    dtype, offset = SLOT.fields[name][:2]
    return offset, offset + dtype.itemsize


def largest(name: str):
    """The value of a field that sets most of its bits."""
    dtype = SLOT.fields[name][0]
    if dtype.kind == "S":
        return b"\xff" * dtype.itemsize
    return -1.5e300 if dtype.kind == "f" else np.iinfo(dtype).max


def test_fields_do_not_overlap_and_fit_the_slot():
    extents = sorted(extent_of(name) for name in SLOT.names)
    assert all(end <= start for (_, end), (start, _) in pairwise(extents))
    assert extents[-1][1] <= SLOT.itemsize
    assert SLOT.itemsize % LINE == 0


def test_fields_are_aligned_to_their_size():
    for name in SLOT.names:
        dtype, offset = SLOT.fields[name][:2]
        assert dtype.kind == "S" or offset % dtype.itemsize == 0, name


def test_router_and_worker_share_no_cache_line(arena):
    router = {line for name in ROUTER_FIELDS for line in lines_of(name)}
    worker = {line for name in WORKER_FIELDS for line in lines_of(name)}
    assert router.isdisjoint(worker)
    assert arena.spec.slots_offset % LINE == 0


def lines_of(name: str) -> range:
    start, end = extent_of(name)
    return range(start // LINE, -(-end // LINE))


def test_words_stand_where_the_fields_do():
    assert extent_of("generation")[0] == GENERATION_WORD * 8
    assert extent_of("client_finish")[0] == CLIENT_FINISH_WORD * 8
    assert extent_of("published")[0] == PUBLISHED_WORD * 8


@pytest.mark.parametrize("name", SLOT.names)
def test_a_field_changes_itself_only(arena, name):
    headers = arena.slots.headers
    before = headers.copy()
    headers[2][name] = largest(name)
    changed = [(slot, field) for slot in range(4) for field in NAMES if headers[slot][field] != before[slot][field]]
    assert changed == [(2, name)]
    assert headers[2][name] == largest(name)
    headers[:] = before


@given(data=st.data())
def test_write_round_trips_every_field(arena, data):
    fields = {name: data.draw(values_of(name), label=name) for name in ROUTER_FIELDS}
    arena.slots.write(1, fields)
    for name, value in fields.items():
        assert arena.slots.headers[1][name] == value, name


def values_of(name: str) -> st.SearchStrategy:
    dtype = SLOT.fields[name][0]
    if name == "client_finish":
        return REASONS
    if dtype.kind == "f":
        return st.floats(allow_nan=False)
    limits = np.iinfo(dtype)
    return st.integers(int(limits.min), int(limits.max))


def test_write_leaves_nothing_of_the_last_owner(arena):
    """What the new owner does not set is zero, above all the verdict on the old one."""
    arena.slots.write(1, {name: largest(name) for name in ROUTER_FIELDS})
    for name in WORKER_FIELDS:
        arena.slots.headers[1][name] = largest(name)
    neighbours = arena.slots.headers[[0, 2, 3]].copy()
    arena.slots.write(1, {"generation": 5})
    left = {name for name in NAMES if arena.slots.headers[1][name] not in (0, b"")}
    assert left == {"generation", "published"}
    assert arena.slots.published(1, 5) == Published(0, FinishReason.NONE, False)
    assert arena.slots.client_finish(1) is FinishReason.NONE
    assert (arena.slots.headers[[0, 2, 3]] == neighbours).all()


@given(output_len=st.integers(0, 2**32 - 1), finish=REASONS, released=st.booleans(), generation=U64)
def test_published_comes_back_whole(arena, output_len, finish, released, generation):
    arena.slots.publish(3, generation, output_len, finish, released=released)
    assert arena.slots.published(3, generation) == Published(output_len, finish, released)
    assert arena.slots.headers["published"][3] == arena.words[arena.slots.word(3, PUBLISHED_WORD)]


@given(generation=U64, later=st.integers(1, 0xFFFF))
def test_another_generation_gets_nothing(arena, generation, later):
    arena.slots.publish(0, generation, 7, FinishReason.EOS, released=True)
    assert arena.slots.published(0, generation + later) is None
    assert arena.slots.published(0, generation) == Published(7, FinishReason.EOS, True)


def test_each_slot_publishes_its_own_word(arena):
    for slot in range(len(arena.slots)):
        arena.slots.publish(slot, 9, slot + 1, FinishReason.NONE, released=False)
    assert [arena.slots.published(slot, 9).output_len for slot in range(4)] == [1, 2, 3, 4]


@given(reason=REASONS)
def test_client_finish_is_the_routers_word_alone(arena, reason):
    arena.slots.write(2, {"generation": 1})
    before = arena.slots.headers.copy()
    arena.slots.set_client_finish(2, reason)
    assert arena.slots.client_finish(2) is reason
    before["client_finish"][2] = reason
    assert (arena.slots.headers == before).all()


def place(arena, slot: int, blob: bytes, prompt: list[int], max_tokens: int, offset: int) -> None:
    """Lay out an extent as the router does: blob, prompt ids, output ids."""
    prompt_at = offset + -(-len(blob) // 4) * 4
    sizes = {"params_bytes": len(blob), "prompt_len": len(prompt), "max_tokens": max_tokens}
    offsets = {"params_offset": offset, "prompt_offset": prompt_at, "output_offset": prompt_at + 4 * len(prompt)}
    arena.slots.write(slot, {"generation": 1, **sizes, **offsets})
    arena.slots.write_params(slot, blob)
    arena.slots.prompt_ids(slot)[:] = prompt
    arena.slots.output_ids(slot)[:] = np.arange(max_tokens) - slot


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(blob=st.binary(max_size=50), prompt=IDS, max_tokens=st.integers(0, 20))
def test_the_extents_parts_do_not_meet(arena, blob, prompt, max_tokens):
    for slot in range(4):
        place(arena, slot, blob, prompt, max_tokens, offset=slot * 1024)
    for slot in range(4):
        assert arena.slots.params(slot) == blob
        assert arena.slots.prompt_ids(slot).tolist() == prompt
        assert arena.slots.output_ids(slot).tolist() == list(range(-slot, max_tokens - slot))


def test_an_empty_prompt_at_the_end_of_the_heap(arena):
    arena.slots.write(0, {"generation": 1, "prompt_offset": arena.spec.heap_bytes})
    assert arena.slots.prompt_ids(0).tolist() == []


def test_the_heap_begins_after_the_slots(arena):
    before = arena.slots.headers.copy()
    place(arena, 0, b"\xff" * 64, [2**31 - 1] * 8, 8, offset=0)
    assert (arena.slots.headers[1:] == before[1:]).all()
    assert arena.memory[arena.spec.heap_offset] == 0xFF
