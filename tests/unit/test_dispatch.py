"""Which group a request goes to, and what becomes of it when that group is down; on real rings without workers."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_lib.arena import CommandKind, Doorbell
from backend_lib.request import FinishReason, GenerationRequest
from backend_lib.router.dispatch import Dispatch
from backend_lib.router.group import LOOKAHEAD, Group, ring_records
from backend_lib.router.prefix_map import BLOCK, PrefixMap, block_keys
from backend_lib.router.reply import ErrorKind, Verdict
from backend_lib.router.stream import Stream
from backend_lib.router.trial import SUSPECT_DEATHS
from tests.support.arena import close, new_arena
from tests.support.senders import ListSender

CANCELLED = Verdict(FinishReason.CANCELLED, ErrorKind.CANCELLED, "gone")
RUNNING, SLACK = 8, 2
PROMPT_BYTES = 4 * 8 * BLOCK
ADMIT, ABORT = CommandKind.ADMIT, CommandKind.ABORT


class Fixture:
    """Groups without workers; the test reads the rings and publishes as workers would."""

    def __init__(self, num_groups: int = 2) -> None:
        self.arena = new_arena(
            num_groups=num_groups, num_ranks=1, num_slots=128, ring_records=ring_records(RUNNING), dirty_records=64,
            heap_bytes=128 * PROMPT_BYTES,
        )  # fmt: skip
        self.released: list[Stream] = []
        self.failing: set[int] = set()
        self.groups = [
            Group(self.arena, index, replies=Doorbell(), max_running=RUNNING, on_released=self.released.append)
            for index in range(num_groups)
        ]
        self.dispatch = Dispatch(
            self.groups, self.arena.slots, max_running=RUNNING, can_start=lambda index: index not in self.failing
        )
        for group in self.groups:
            self.dispatch.set_kv_tokens(group.index, 64 * BLOCK)
        self.made = 0

    def up(self, *indices: int) -> None:
        for index in indices:
            self.groups[index].came_up()
            self.dispatch.move_from_all()

    def down(self, index: int, *, failed: bool = False) -> None:
        """The workers have died, or, if `failed`, could not start."""
        if failed:
            self.failing.add(index)
        self.released += self.groups[index].went_down()
        self.dispatch.forget(index)
        self.dispatch.move_from(self.groups[index])

    def streams(self, prompt: list[int] | None = None, count: int = 1, **fields) -> list[Stream]:
        """The sequences of one request, not submitted yet."""
        request = GenerationRequest(request_id="", text="", **fields)
        made = [Stream(request, ListSender(), self.made + number, 7) for number in range(count)]
        self.made += count
        for stream in made:
            ids = prompt or [1]
            at = stream.slot * PROMPT_BYTES
            self.arena.slots.write(stream.slot, {"generation": 7, "prompt_offset": at, "prompt_len": len(ids)})
            self.arena.slots.prompt_ids(stream.slot)[:] = ids
        return made

    def submit(self, prompt: list[int] | None = None, count: int = 1, **fields) -> list[Stream]:
        made = self.streams(prompt, count, **fields)
        self.dispatch.assign(made)
        for stream in made:
            self.dispatch.submit(stream)
        return made

    def one(self, prompt: list[int] | None = None, **fields) -> Stream:
        return self.submit(prompt, **fields)[0]

    def settle(self, *streams: Stream) -> None:
        """Their workers have released them."""
        for stream in streams:
            self.arena.slots.publish(stream.slot, 7, 1, FinishReason.LENGTH, released=True)
            self.dispatch.touched(stream, self.arena.slots.published(stream.slot, 7))

    def abort(self, stream: Stream) -> None:
        assert stream.decide(CANCELLED)
        self.dispatch.abort(stream)

    def commands(self, index: int) -> list[tuple[CommandKind, int]]:
        """What a group has been posted since the last call."""
        ring = self.groups[index].ring
        found = ring.read(0)
        if found:
            ring.advance(0, found[-1].sequence)
        return [(command.kind, command.slot) for command in found]

    def admitted(self, index: int) -> list[int]:
        return [slot for kind, slot in self.commands(index) if kind is ADMIT]


@pytest.fixture
def it():
    fixture = Fixture()
    yield fixture
    close(fixture.arena)


def blocks(*names: int) -> list[int]:
    return [name for name in names for _ in range(BLOCK)]


# The choice.


def test_the_least_loaded_of_equal_groups_and_then_the_one_chosen_longest_ago(it) -> None:
    it.up(0, 1)
    first = [it.one() for _ in range(4)]
    assert [stream.group for stream in first] == [0, 1, 0, 1]
    it.settle(first[1], first[3])
    assert [it.one().group for _ in range(3)] == [1, 1, 0]
    it.settle(*first)


def test_one_after_the_other_they_go_around(it) -> None:
    """Not always to the first group, whose cache they would fill while the other's stays empty."""
    it.up(0, 1)
    groups = []
    for _ in range(4):
        groups.append((stream := it.one()).group)
        it.settle(stream)
    assert groups == [0, 1, 0, 1]


def test_the_longest_beginning_decides(it) -> None:
    it.up(0, 1)
    short, other = it.one(blocks(1, 2)), it.one(blocks(1, 2, 3, 4), dp_rank=1)
    it.settle(short, other)
    assert it.one(blocks(1, 2, 3, 9)).group == 1
    assert it.one([*blocks(1, 2, 7), 5]).group == 0, "equal beginnings: the less loaded"
    assert it.one(blocks(1, 2, 7, 8)).group == 0, "what it was sent last"


def test_a_beginning_shorter_than_a_block_or_not_at_the_start_is_none(it) -> None:
    it.up(0, 1)
    it.settle(it.one(blocks(1, 2)))
    almost = [1] * (BLOCK - 1) + [9]
    groups = [it.one(prompt).group for prompt in (almost, blocks(2), [1] * (BLOCK - 1))]
    assert groups == [1, 0, 1]


def test_an_overloaded_group_is_not_chosen_for_its_cache(it) -> None:
    it.up(0, 1)
    groups = [it.one(blocks(1)).group for _ in range(2 * SLACK + 4)]
    assert groups[: SLACK + 1] == [0] * (SLACK + 1), "so many more than the other one, which has none"
    assert groups[SLACK + 1] == 1
    assert groups.count(0) - groups.count(1) <= SLACK, "from here on both have it"


def test_a_request_that_keeps_out_of_the_cache_looks_for_none_and_leaves_none(it) -> None:
    it.up(0, 1)
    it.settle(it.one(blocks(1), disable_prompt_cache=True))
    it.settle(it.one(blocks(1)))
    assert it.one(blocks(1), disable_prompt_cache=True).group == 0
    assert it.one(blocks(1)).group == 1


def test_all_sequences_of_a_request_go_to_one_group(it) -> None:
    it.up(0, 1)
    for _ in range(3):
        assert len({stream.group for stream in it.submit(count=5)}) == 1


def test_a_request_may_name_its_group_whatever_is_there(it) -> None:
    it.up(0)
    streams = [it.one(dp_rank=1) for _ in range(3)]
    assert [stream.group for stream in streams] == [1, 1, 1] and it.admitted(0) == []
    it.down(1, failed=True)
    assert it.admitted(0) == []
    it.up(1)
    assert it.admitted(1) == [stream.slot for stream in streams]
    headers = it.arena.slots.headers
    assert {int(headers["group"][stream.slot]) for stream in streams} == {1}


def test_a_group_that_was_restarted_has_nothing_cached(it) -> None:
    it.up(0, 1)
    it.settle(it.one(blocks(1)))
    it.down(0)
    it.up(0)
    assert it.one(blocks(1)).group == 1


def test_a_map_forgets_the_least_recently_sent_and_of_a_prompt_its_end_first() -> None:
    prefixes = PrefixMap(3)
    first, second = block_keys(np.array(blocks(1, 2), np.int32)), block_keys(np.array(blocks(3, 4), np.int32))
    prefixes.add(first)
    prefixes.add(second)
    assert (prefixes.matched(first), prefixes.matched(second), len(prefixes)) == (1, 2, 3)
    prefixes.add(first)
    assert (prefixes.matched(first), prefixes.matched(second)) == (2, 1)
    prefixes.clear()
    assert prefixes.matched(first) == len(prefixes) == 0


def common(first: list[int], second: list[int]) -> int:
    return next((at for at in range(len(first)) if first[: at + 1] != second[: at + 1]), len(first))


PROMPTS = st.lists(st.integers(0, 2), max_size=4)


@given(st.lists(PROMPTS, max_size=8), PROMPTS, st.integers(0, BLOCK - 1))
def test_a_match_is_the_longest_common_beginning_of_whole_blocks(sent, asked, rest) -> None:
    prefixes = PrefixMap(1000)
    for prompt in sent:
        prefixes.add(block_keys(np.array(blocks(*prompt), np.int32)))
    lengths = [common(asked, each) for each in sent]
    keys = block_keys(np.array(blocks(*asked) + [7] * rest, np.int32))
    assert prefixes.matched(keys) == max(lengths, default=0)


# A group that is down.


def test_while_all_are_down_they_wait_and_the_first_that_comes_up_takes_them(it) -> None:
    streams = [it.one() for _ in range(6)]
    assert {stream.group for stream in streams} == {0, 1}
    it.up(1)
    assert it.admitted(1) == [1, 3, 5, 0, 2, 4] and it.admitted(0) == []
    assert {stream.group for stream in streams} == {1}


def test_what_waits_goes_to_the_others_and_what_was_given_waits_for_the_next_workers(it) -> None:
    it.up(0, 1)
    full = RUNNING + LOOKAHEAD
    streams = [it.one() for _ in range(2 * full + 4)]
    given, waiting = streams[: 2 * full : 2], streams[2 * full :: 2]
    assert it.admitted(0) == [stream.slot for stream in given]
    it.commands(1)
    it.down(0)
    assert {stream.group for stream in given} == {0} and {stream.group for stream in waiting} == {1}
    assert it.one().group == 1, "what arrives goes there as well"
    it.settle(*streams[1 : 2 * full : 2])
    assert it.admitted(1) == [stream.slot for stream in streams[2 * full :]] + [streams[-1].slot + 1]
    it.up(0)
    assert it.admitted(0) == [stream.slot for stream in given]


def test_once_a_start_has_failed_all_of_it_goes_on_elsewhere(it) -> None:
    """From the tokens that were published, in the old order, and ahead of those that came later."""
    it.up(0, 1)
    first, named, second = it.one(), it.one(dp_rank=0), it.one(dp_rank=0, priority=1)
    third = it.one(priority=3)
    it.dispatch.submit(third)
    assert third.group == 1
    moving = it.streams(priority=2)[0]
    moving.group, moving.arrival = 0, 50
    it.dispatch.submit(moving)
    it.arena.slots.publish(moving.slot, 7, 5, FinishReason.NONE, released=False)
    it.commands(1)
    it.down(0)
    assert it.admitted(1) == []
    it.down(0, failed=True)
    ring = it.groups[1].ring
    assert [(each.slot, each.argument) for each in ring.read(0)] == [(moving.slot, 5), (first.slot, 0)]
    assert [stream.group for stream in (moving, first, named, second)] == [1, 1, 0, 0]
    assert int(it.arena.slots.headers["group"][first.slot]) == 1
    assert it.groups[0].movable(given=True) == []
    it.settle(moving, first)
    assert it.released == [moving, first]
    it.failing.clear()
    it.up(0)
    assert it.admitted(0) == [named.slot, second.slot], "in the order of admission"


def test_the_sequences_of_a_request_move_together(it) -> None:
    it.failing.add(1)
    requests = [it.submit(count=3) for _ in range(3)]
    it.down(0, failed=True)
    assert {stream.group for request in requests for stream in request} <= {0, 1}
    three = Fixture(3)
    requests = [three.submit(count=3, dp_rank=None) for _ in range(4)]
    three.up(1)
    three.up(2)
    three.down(1, failed=True)
    groups = [{stream.group for stream in request} for request in requests]
    assert groups == [{2}] * 4
    close(three.arena)


def test_a_suspect_stays_with_its_group(it) -> None:
    """It may be what keeps killing the workers there."""
    it.up(0, 1)
    suspect, innocent = it.one(), it.submit(dp_rank=None)[0]
    other = it.one()
    assert (suspect.group, innocent.group, other.group) == (0, 1, 0)
    suspect.deaths = SUSPECT_DEATHS
    it.commands(1)
    it.down(0, failed=True)
    assert (suspect.group, other.group) == (0, 1) and it.admitted(1) == [other.slot]


def test_an_abort_finds_a_stream_wherever_it_has_gone(it) -> None:
    it.up(0, 1)
    stream = it.one()
    it.down(0, failed=True)
    it.commands(1)
    it.abort(stream)
    assert it.commands(1) == [(ABORT, stream.slot)] and it.released == []
    it.settle(stream)
    assert it.released == [stream]


# Races, each played step by step.


def test_a_group_that_goes_down_between_choice_and_submit(it, monkeypatch) -> None:
    """Whoever emptied its queue did not see the stream."""
    it.up(0, 1)
    submit = it.groups[0].submit

    def late(stream: Stream) -> None:
        it.down(0)
        submit(stream)

    monkeypatch.setattr(it.groups[0], "submit", late)
    stream = it.one()
    assert stream.group == 1 and it.admitted(1) == [stream.slot]


def test_an_abort_that_comes_while_the_stream_goes(it, monkeypatch) -> None:
    """It has read the old group, and takes its lock when the new one has posted the stream."""
    it.up(0, 1)
    stream = it.one()
    choose = it.dispatch._choose

    def late(each: Stream) -> int:
        assert each.decide(CANCELLED)
        return choose(each)

    monkeypatch.setattr(it.dispatch, "_choose", late)
    it.down(0, failed=True)
    assert not it.groups[0].abort(stream) and it.released == []
    it.dispatch.abort(stream)
    assert it.commands(1) == [(ADMIT, stream.slot), (ABORT, stream.slot)] and it.released == []


def test_an_abort_between_leaving_one_group_and_entering_the_next(it, monkeypatch) -> None:
    """Then nobody has it, and it is over: the next group must not post a slot that may be another's."""
    it.up(0, 1)
    stream = it.one()
    submit = it.groups[1].submit

    def late(each: Stream) -> None:
        it.abort(each)
        submit(each)

    monkeypatch.setattr(it.groups[1], "submit", late)
    it.down(0, failed=True)
    assert it.released == [stream] and it.commands(1) == [] and it.groups[1].num_streams == 0
    assert stream.last_command == 0, "the slot waits for no command in the new group's ring"


def test_an_abort_just_before_the_stream_would_go(it, monkeypatch) -> None:
    """Its slot is the old group's to give back."""
    it.up(0, 1)
    stream = it.one()
    choose = it.dispatch._choose

    def late(each: Stream) -> int:
        it.abort(each)
        return choose(each)

    monkeypatch.setattr(it.dispatch, "_choose", late)
    it.down(0, failed=True)
    assert stream.group == 0 and it.released == [stream] and it.commands(1) == []


def test_a_stream_that_two_threads_move_is_posted_once(it, monkeypatch) -> None:
    """One has it between two groups, when the other moves what is there and it comes back."""
    it.up(0, 1)
    stream = it.one()
    submit = it.groups[1].submit

    def late(each: Stream) -> None:
        monkeypatch.undo()
        submit(each)  # the other thread's
        submit(each)

    monkeypatch.setattr(it.groups[1], "submit", late)
    it.down(0, failed=True)
    assert it.admitted(1) == [stream.slot] and it.groups[1].num_streams == 1


def test_a_group_that_comes_up_meanwhile_keeps_what_it_has(it, monkeypatch) -> None:
    it.up(0, 1)
    stream = it.one()
    it.commands(0)
    choose = it.dispatch._choose

    def late(each: Stream) -> int:
        it.groups[0].came_up()
        return choose(each)

    monkeypatch.setattr(it.dispatch, "_choose", late)
    it.down(0, failed=True)
    assert stream.group == 0 and it.admitted(0) == [stream.slot] and it.admitted(1) == []


def test_aborts_and_moves_at_once_release_each_stream_once(it) -> None:
    it.up(0, 1)
    for _ in range(40):
        (stream,) = it.streams()
        it.dispatch.submit(stream)  # to group 0
        barrier = threading.Barrier(2)
        calls = [lambda: it.down(0, failed=True), lambda s=stream: it.abort(s)]
        threads = [threading.Thread(target=lambda c=call, b=barrier: (b.wait(), c())) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        posted = it.commands(1)
        assert posted in ([], [(ADMIT, stream.slot), (ABORT, stream.slot)])
        if posted:
            assert it.released.count(stream) == 0
            it.settle(stream)
        assert it.released.count(stream) == 1
        it.failing.clear()
        it.up(0)
        assert it.commands(0) == []
