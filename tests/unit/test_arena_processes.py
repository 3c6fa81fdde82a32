"""Two and three real processes on one arena. The other side is tests/support/arena_peer.py."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

from backend_lib.arena import Arena, CommandKind, DirtyList, Doorbell, SlotRef
from tests.support.arena import close, new_arena, peer
from tests.support.arena_peer import PATIENCE, expected_command, expected_generation


class Follower:
    """The router's end of the dirty list. The list tells how far the worker is; after a loss, slot 0 does."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.dirty: DirtyList = arena.dirty_list(0)
        self.seen = 0
        self.losses = 0

    def follow(self) -> None:
        refs = self.dirty.drain()
        published = self.arena.slots.published(0, 1)
        if refs is None:
            self.losses += 1
            self.seen = published.output_len
        elif refs:
            self._check(refs, published.output_len)

    def _check(self, refs: list[SlotRef], published: int) -> None:
        """In order, each with what it stands for, nothing left out that a rescan did not show, nothing unpublished."""
        first = refs[0].generation & 0xFFFFFFFF
        last = first + len(refs) - 1
        assert first <= self.seen + 1
        assert [ref.generation for ref in refs] == [*map(expected_generation, range(first, last + 1))]
        assert refs[0].slot == expected_command(first).slot
        assert last <= published
        assert self.losses or first == self.seen + 1
        self.seen = max(self.seen, last)


def post_stream(arena: Arena, bells: list[Doorbell], last: int, follower: Follower) -> None:
    ring = arena.ring(0)
    for sequence in range(1, last + 1):
        _, kind, slot, generation, argument = expected_command(sequence)
        ring.post(kind, slot, generation, argument, timeout=PATIENCE)
        if sequence % 64 == 0 or sequence == last:
            for bell in bells:
                bell.ring()
            follower.follow()


def follow_to_the_end(follower: Follower, reply: Doorbell, last: int) -> None:
    while follower.seen < last:
        assert reply.wait(PATIENCE), f"no answer after {follower.seen}"
        follower.follow()


def stream(last: int, num_ranks: int, dirty_records: int) -> Follower:
    arena = new_arena(num_ranks=num_ranks, ring_records=256, dirty_records=dirty_records)
    arena.slots.write(0, {"generation": 1})
    bells = [Doorbell() for _ in range(num_ranks + 1)]
    *worker_bells, reply = bells
    follower = Follower(arena)
    with run_ranks(arena, worker_bells, reply, last):
        post_stream(arena, worker_bells, last, follower)
        follow_to_the_end(follower, reply, last)
    assert arena.ring(0).passed_by_all(last)
    for bell in bells:
        bell.close()
    close(arena)
    return follower


def run_ranks(arena: Arena, bells: list[Doorbell], reply: Doorbell, last: int) -> ExitStack:
    with ExitStack() as stack:
        for rank, bell in enumerate(bells):
            stack.enter_context(peer("stream", arena, rank, last, bells=(bell, reply)))
        return stack.pop_all()


def test_a_million_commands_cross_in_order(capsys):
    start = time.monotonic()
    follower = stream(1_000_000, num_ranks=1, dirty_records=4096)
    with capsys.disabled():
        print(f"\n1,000,000 commands in {time.monotonic() - start:.1f} s; dirty list lost {follower.losses} times")
    assert follower.losses == 0


def test_two_readers_and_a_dirty_list_that_overflows():
    """A list of eight entries is lost all the time; the rescan makes up for it."""
    follower = stream(50_000, num_ranks=2, dirty_records=8)
    assert follower.losses > 0


def test_no_wake_up_is_lost_in_twenty_thousand_round_trips(capsys):
    arena = new_arena(num_ranks=1, ring_records=4)
    bell, reply = Doorbell(), Doorbell()
    with peer("echo", arena, 20_000, bells=(bell, reply)):
        assert reply.wait(PATIENCE), "the other process did not start"
        times = round_trips(arena, bell, reply, 20_000)
    with capsys.disabled():
        print(f"\nround trip p50 {statistics.median(times) / 1000:.0f} us")
    close(arena)


def round_trips(arena: Arena, bell: Doorbell, reply: Doorbell, count: int) -> list[int]:
    ring, dirty, times = arena.ring(0), arena.dirty_list(0), []
    for sequence in range(1, count + 1):
        start = time.perf_counter_ns()
        ring.post(CommandKind.ADMIT, 0, sequence)
        bell.ring()
        assert reply.wait(PATIENCE), f"no answer to {sequence}; rank 0 has read up to {ring.cursor(0)}"
        times.append(time.perf_counter_ns() - start)
        assert dirty.drain() == [SlotRef(0, sequence)]
        assert arena.slots.published(0, sequence).output_len == sequence
    return times
