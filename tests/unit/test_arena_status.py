"""The status block: what a worker says is what the others read, in an order that never shows half of it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.arena import Load, WorkerState
from backend_lib.arena.layout import ERROR_BYTES
from tests.support.arena import close, new_arena, watch_stores

LOADS = st.builds(Load, *[st.integers(0, 2**64 - 1)] * len(Load._fields))
LOAD = Load(step=1, running=2, waiting=3, paused=4, kv_used=5, cached=6, pauses=7, recomputed=8)


@pytest.fixture(scope="module")
def arena():
    arena = new_arena()
    yield arena
    close(arena)


@pytest.fixture
def status(arena):
    arena.status(1, 1).reset()
    return arena.status(1, 1)


def test_a_new_block_is_starting_and_empty():
    arena = new_arena()
    status = arena.status(0, 0)
    assert (status.state, status.heartbeat_ns, status.kv_tokens, status.error) == (WorkerState.STARTING, 0, 0, "")
    assert status.load == Load(*[0] * 8)
    close(arena)


def test_states(status):
    status.set_loading()
    assert status.state is WorkerState.LOADING
    status.set_ready(12345)
    assert (status.state, status.kv_tokens) == (WorkerState.READY, 12345)
    status.set_failed("no weights")
    assert (status.state, status.error) == (WorkerState.FAILED, "no weights")


@given(load=LOADS)
def test_a_load_round_trips(arena, load):
    writer, reader = arena.status(0, 1), arena.status(0, 1)
    writer.set_ready(77)
    before = time.monotonic_ns()
    writer.set_load(load)
    assert reader.load == load
    assert before <= reader.heartbeat_ns <= time.monotonic_ns()
    assert (reader.state, reader.kv_tokens, reader.error) == (WorkerState.READY, 77, "")


@given(text=st.text(max_size=2 * ERROR_BYTES))
@settings(deadline=None)
def test_an_error_round_trips_or_is_cut_between_characters(arena, text):
    status = arena.status(0, 0)
    status.set_failed(text)
    assert text.startswith(status.error)
    missing = len(text.encode()) - len(status.error.encode())
    assert missing == 0 or len(status.error.encode()) > ERROR_BYTES - 4


@pytest.mark.parametrize("character", ["x", "é", "語", "🦙"])
@pytest.mark.parametrize("before", range(4))
def test_a_cut_inside_a_character_drops_it(status, character, before):
    status.set_failed("x" * before + character * ERROR_BYTES)
    room = (ERROR_BYTES - before) // len(character.encode())
    assert status.error == "x" * before + character * room


def test_an_error_with_an_undecodable_file_name_is_still_told(status):
    status.set_failed(b"no file /models/\xff.safetensors".decode(errors="surrogateescape"))
    assert status.state is WorkerState.FAILED
    assert status.error == "no file /models/?.safetensors"


def test_a_shorter_error_shows_nothing_of_the_last_one(status):
    status.set_failed("a long story")
    status.set_failed("short")
    assert status.error == "short"


def test_reset_forgets_the_old_worker_but_not_what_was_admitted_by(arena, status):
    neighbour = arena.status(1, 0)
    for block in (status, neighbour):
        block.set_ready(9)
        block.set_load(LOAD)
        block.set_failed("gone")
    status.reset()
    assert (status.state, status.heartbeat_ns, status.kv_tokens, status.error) == (WorkerState.STARTING, 0, 9, "")
    assert status.load == Load(*[0] * 8)
    assert (neighbour.state, neighbour.kv_tokens, neighbour.error, neighbour.load) == (3, 9, "gone", LOAD)


def seen_at_every_store(status, reader, write) -> list:
    """What `reader` gives after each of the stores that `write` makes."""
    seen = []

    def look_after(store) -> None:
        store()
        seen.append(reader())

    watch_stores(status, look_after)
    write()
    assert seen
    return seen


def test_who_sees_ready_sees_the_kv_tokens(arena, status):
    reader = arena.status(1, 1)
    seen = seen_at_every_store(status, lambda: (reader.state, reader.kv_tokens), lambda: status.set_ready(5))
    assert all(tokens == 5 for state, tokens in seen if state is WorkerState.READY)


def test_who_sees_failed_sees_the_whole_error(arena, status):
    reader = arena.status(1, 1)
    seen = seen_at_every_store(status, lambda: (reader.state, reader.error), lambda: status.set_failed("out of memory"))
    assert all(error == "out of memory" for state, error in seen if state is WorkerState.FAILED)
    assert all(error in ("", "out of memory") for _, error in seen)


def test_who_sees_the_heartbeat_sees_the_load(arena, status):
    reader = arena.status(1, 1)
    seen = seen_at_every_store(status, lambda: (reader.heartbeat_ns, reader.load), lambda: status.set_load(LOAD))
    assert all(load == LOAD for heartbeat, load in seen if heartbeat)
