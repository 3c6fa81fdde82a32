"""A group's queue and ring: order, throttle, aborts at every stage, and the life after a worker's death."""

from __future__ import annotations

import threading

import pytest

from backend_lib.arena import LEAD_SHARE, CommandKind, Doorbell, SlotRef
from backend_lib.arena.ring import RingFull
from backend_lib.request import FinishReason, GenerationRequest
from backend_lib.router.group import LOOKAHEAD, Group, ring_records
from backend_lib.router.reply import ErrorKind, Verdict
from backend_lib.router.stream import Stream
from backend_lib.router.trial import SUSPECT_DEATHS
from tests.support.arena import close, new_arena
from tests.support.senders import ListSender

CANCELLED = Verdict(FinishReason.CANCELLED, ErrorKind.CANCELLED, "gone")
RUNNING = 2
FULL = RUNNING + LOOKAHEAD
ADMIT, ABORT = CommandKind.ADMIT, CommandKind.ABORT


class Fixture:
    """A group without a worker; the test reads the ring and publishes as a worker would."""

    def __init__(self) -> None:
        self.arena = new_arena(
            num_groups=1, num_ranks=1, num_slots=64, ring_records=ring_records(RUNNING), dirty_records=64
        )
        self.released: list[Stream] = []
        self.group = Group(self.arena, 0, replies=Doorbell(), max_running=RUNNING, on_released=self.released.append)
        self.made = 0

    def submit(self, priority: int = 0) -> Stream:
        stream = Stream(GenerationRequest(request_id="", text="", priority=priority), ListSender(), self.made, 7)
        self.made += 1
        stream.arrival = self.made
        self.arena.slots.write(stream.slot, {"generation": 7})
        self.group.submit(stream)
        return stream

    def commands(self) -> list[tuple[CommandKind, int]]:
        """What has been posted since the last call."""
        found = self.group.ring.read(0)
        if found:
            self.group.ring.advance(0, found[-1].sequence)
        return [(command.kind, command.slot) for command in found]

    def publish(self, stream: Stream, output_len: int, finish: FinishReason = FinishReason.NONE) -> None:
        self.arena.slots.publish(stream.slot, 7, output_len, finish, released=False)

    def touch(self, stream: Stream, output_len: int) -> None:
        """The worker publishes so many tokens, and the router looks."""
        self.publish(stream, output_len)
        self.group.touched(stream, self.arena.slots.published(stream.slot, 7))

    def begin(self, *streams: Stream) -> None:
        """The worker gives them rows."""
        for stream in streams:
            self.arena.slots.headers["first_scheduled_ns"][stream.slot] += 1

    def abort(self, stream: Stream) -> None:
        assert stream.decide(CANCELLED)
        self.group.abort(stream)

    def restart(self) -> list[Stream]:
        """A worker that was up dies and the next one comes up."""
        gone = self.group.went_down()
        self.group.came_up()
        return gone


@pytest.fixture
def it():
    fixture = Fixture()
    yield fixture
    close(fixture.arena)


def test_nothing_is_posted_before_a_worker_is_up(it) -> None:
    streams = [it.submit() for _ in range(3)]
    assert it.commands() == []
    it.group.came_up()
    assert it.commands() == [(ADMIT, stream.slot) for stream in streams]


def test_priority_goes_first_and_then_arrival(it) -> None:
    low, first, high, second = it.submit(-1), it.submit(), it.submit(5), it.submit()
    it.group.came_up()
    assert it.commands() == [(ADMIT, stream.slot) for stream in (high, first, second, low)]


def test_no_more_is_posted_than_can_run_and_a_few(it) -> None:
    it.group.came_up()
    streams = [it.submit() for _ in range(FULL + 2)]
    assert it.commands() == [(ADMIT, stream.slot) for stream in streams[:FULL]]
    it.group.settle(streams[3])
    it.group.settle(streams[3])  # told twice, counted once
    assert it.commands() == [(ADMIT, streams[FULL].slot)]
    assert it.released == [streams[3]]


def test_the_ring_holds_what_a_worker_can_leave_unread(it) -> None:
    it.group.came_up()
    streams = [it.submit() for _ in range(2 * FULL)]
    it.commands()
    for stream in streams[:FULL]:
        it.abort(stream)
    for stream in streams[:FULL]:
        it.group.settle(stream)
    for stream in streams[FULL:]:
        it.abort(stream)  # raises RingFull after a while, were there no room
    assert len(it.commands()) == ring_records(RUNNING) - ring_records(RUNNING) // LEAD_SHARE


def test_a_post_that_fails_leaves_the_stream_waiting(it, monkeypatch) -> None:
    it.group.came_up()
    with monkeypatch.context() as context, pytest.raises(RingFull):
        context.setattr(it.group.ring, "post", failing_post)
        it.submit()
    assert it.group.num_streams == 1
    second = it.submit()
    assert it.commands() == [(ADMIT, 0), (ADMIT, second.slot)]


def failing_post(*args) -> int:
    raise RingFull("full")


def test_an_abort_before_the_post_needs_no_worker(it) -> None:
    it.group.came_up()
    streams = [it.submit() for _ in range(FULL + 2)]
    it.commands()
    it.abort(streams[FULL])
    assert it.released == [streams[FULL]] and it.commands() == []
    it.group.settle(streams[0])
    assert it.commands() == [(ADMIT, streams[FULL + 1].slot)]


def test_an_abort_after_the_post_is_told_to_the_worker_which_then_releases(it) -> None:
    it.group.came_up()
    stream = it.submit()
    it.abort(stream)
    assert it.commands() == [(ADMIT, 0), (ABORT, 0)] and it.released == []
    assert stream.last_command == 2
    assert it.arena.slots.client_finish(0) is FinishReason.CANCELLED
    it.group.settle(stream)
    assert it.released == [stream]


def test_an_abort_after_the_release_is_not_posted(it) -> None:
    it.group.came_up()
    stream = it.submit()
    it.group.settle(stream)
    it.abort(stream)
    assert it.commands() == [(ADMIT, 0)] and it.released == [stream]
    assert it.arena.slots.client_finish(0) is FinishReason.NONE  # the slot may be another's by now


def test_an_abort_before_the_submit_keeps_it_from_being_posted(it) -> None:
    it.group.came_up()
    stream = Stream(GenerationRequest(request_id="", text=""), ListSender(), 9, 7)
    it.abort(stream)
    it.group.submit(stream)
    assert it.released == [stream] and it.commands() == []


@pytest.mark.parametrize("queued", [False, True])
def test_settle_and_abort_at_once_release_once(it, queued: bool) -> None:
    """Both sides of the race, many times: whoever comes second finds nothing to do."""
    if not queued:
        it.group.came_up()
    for _ in range(60):
        stream = it.submit()
        barrier = threading.Barrier(2)
        calls = [lambda s=stream: it.abort(s), lambda s=stream: it.group.settle(s)]
        if queued:
            calls[1] = lambda s=stream: it.group.abort(s) if s.verdict else None
        threads = [threading.Thread(target=lambda c=call, b=barrier: (b.wait(), c())) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert it.released.count(stream) == 1
        it.commands()


def test_a_new_worker_is_given_the_same_in_the_same_order(it) -> None:
    it.group.came_up()
    streams = [it.submit(priority) for priority in (0, 3, 1)]
    waiting = [it.submit() for _ in range(FULL)]
    it.group.settle(streams[1])
    it.commands()
    epoch = it.arena.epoch(0)
    assert it.restart() == []
    assert it.arena.epoch(0) == epoch + 1
    order = [streams[0], streams[2], *waiting[: FULL - 2]]
    assert it.commands() == [(ADMIT, stream.slot) for stream in order]


def test_commands_for_a_dead_worker_are_forgotten(it) -> None:
    it.group.came_up()
    stream = it.submit()
    it.group.went_down()
    assert it.commands() == []
    it.group.came_up()
    assert it.commands() == [(ADMIT, stream.slot)]


def test_what_had_ended_is_not_given_to_a_new_worker(it) -> None:
    it.group.came_up()
    ended, cancelled, alive = it.submit(), it.submit(), it.submit()
    it.publish(ended, 3, FinishReason.EOS)
    it.abort(cancelled)
    it.commands()
    assert it.restart() == [ended, cancelled]
    assert it.commands() == [(ADMIT, alive.slot)]


def test_an_abort_while_no_worker_is_up_releases_at_once(it) -> None:
    """Posted now, it would stand before the ADMIT for the next worker, which would compute the sequence to its end."""
    it.group.came_up()
    stream, alive = it.submit(), it.submit()
    it.commands()
    it.group.went_down()
    it.abort(stream)
    assert it.released == [stream]
    it.group.came_up()
    assert it.commands() == [(ADMIT, alive.slot)]


def test_deaths_count_only_while_nothing_is_published(it) -> None:
    it.group.came_up()
    stuck, moving = it.submit(), it.submit()
    for number in range(1, SUSPECT_DEATHS + 1):
        it.begin(stuck, moving)
        it.publish(moving, number)
        assert it.restart() == []
        assert (stuck.deaths, moving.deaths) == (number, 0)


def suspects(it, count: int) -> list[Stream]:
    """Streams that a worker has just been given back, the first of them alone, with others that are above suspicion."""
    it.group.came_up()
    streams = [it.submit() for _ in range(count)]
    for _ in range(SUSPECT_DEATHS):
        it.begin(*streams)
        it.commands()
        assert it.restart() == []
    return streams


def test_suspects_run_one_at_a_time_and_then_everything_else(it) -> None:
    first, second = suspects(it, 2)
    other = it.submit()
    assert it.commands() == [(ADMIT, first.slot)]
    it.touch(first, 1)
    assert it.commands() == [(ADMIT, second.slot)]
    it.touch(first, 2)
    assert it.commands() == []
    it.touch(second, 1)
    assert it.commands() == [(ADMIT, other.slot)]


def test_a_suspect_that_ends_makes_way(it) -> None:
    first, second, third = suspects(it, 3)
    it.commands()
    it.abort(first)
    it.abort(second)  # the worker does not know this one
    assert it.commands() == [(ABORT, first.slot)] and it.released == [second]
    it.group.settle(first)
    assert it.commands() == [(ADMIT, third.slot)]
    it.group.settle(third)
    late = it.submit()
    assert it.commands() == [(ADMIT, late.slot)]


def test_who_was_given_back_with_the_suspects_follows_in_the_old_order(it) -> None:
    it.group.came_up()
    moving, stuck, late = it.submit(), it.submit(), it.submit()
    for number in range(1, SUSPECT_DEATHS + 1):
        it.begin(moving, stuck)
        it.publish(moving, number)
        it.commands()
        it.restart()
    assert it.commands() == [(ADMIT, stuck.slot)]
    it.touch(stuck, 1)
    assert it.commands() == [(ADMIT, moving.slot), (ADMIT, late.slot)]


def test_who_is_alone_at_the_next_death_is_convicted(it) -> None:
    first, second = suspects(it, 2)
    it.begin(first)
    assert it.restart() == [first]
    assert first.convicted and not second.convicted and it.released == []  # the caller looks at what came back
    it.touch(second, 1)
    it.begin(second)
    assert it.restart() == []


def test_who_is_the_only_suspect_but_not_alone_is_tried_again_first(it) -> None:
    first, second, third = suspects(it, 3)
    it.begin(first)
    it.touch(first, 1)
    it.begin(second)  # dies here, with the first one still running
    it.commands()
    assert it.restart() == [] and second.deaths == SUSPECT_DEATHS + 1
    assert it.commands() == [(ADMIT, second.slot)]
    it.begin(second)
    assert it.restart() == [second]
    assert it.commands() == [(ADMIT, third.slot)]


def test_a_suspect_that_was_not_begun_is_not_convicted(it) -> None:
    (only,) = suspects(it, 1)
    assert it.restart() == [] and not only.convicted


def test_a_late_word_of_the_last_worker_clears_nobody(it) -> None:
    """Read before the death, and handled after the next worker has come up."""
    it.group.came_up()
    first, second = it.submit(), it.submit()
    it.publish(first, 5)
    stale = it.arena.slots.published(first.slot, 7)
    first.deaths = second.deaths = SUSPECT_DEATHS
    it.commands()
    it.restart()
    assert it.commands() == [(ADMIT, first.slot)]
    it.group.touched(first, stale)
    assert it.commands() == []


def test_progress_forgives_earlier_deaths(it) -> None:
    it.group.came_up()
    stream = it.submit()
    for death in range(1, 3 * SUSPECT_DEATHS):
        it.begin(stream)
        if death % SUSPECT_DEATHS == 0:
            it.touch(stream, death)
        assert it.restart() == [] and stream.deaths == death % SUSPECT_DEATHS


def test_what_a_worker_owes(it) -> None:
    it.group.came_up()
    assert not it.group.owed
    stream = it.submit()
    assert it.group.owed  # a command to read
    it.commands()
    assert it.group.owed  # a sequence to compute
    it.arena.slots.publish(stream.slot, 7, 3, FinishReason.EOS, released=True)
    assert not it.group.owed  # that the router has not looked yet is not the worker's fault
    waiting = [it.submit() for _ in range(FULL + 2)]
    it.commands()
    it.group.went_down()
    assert waiting and not it.group.owed


def test_progress_is_a_command_read_or_something_published(it) -> None:
    it.group.came_up()
    stream = it.submit()
    seen = [it.group.progress, it.group.progress]
    it.commands()
    seen.append(it.group.progress)
    it.group.dirty.append([SlotRef(stream.slot, 7)])
    seen.append(it.group.progress)
    assert seen[0] == seen[1] and len(set(seen)) == 3


def test_a_worker_that_dies_before_it_is_up_was_killed_by_no_request(it) -> None:
    it.group.came_up()
    stream = it.submit()
    it.begin(stream)
    it.group.went_down()
    for _ in range(2 * SUSPECT_DEATHS):
        assert it.group.went_down() == []
    it.group.came_up()
    assert it.commands() == [(ADMIT, stream.slot)] and stream.deaths == 1


def test_a_worker_that_somebody_killed_was_killed_by_no_request(it) -> None:
    it.group.came_up()
    stream = it.submit()
    for _ in range(2 * SUSPECT_DEATHS):
        it.begin(stream)
        it.commands()
        assert it.group.went_down(is_blamed=False) == []
        it.group.came_up()
        assert it.commands() == [(ADMIT, stream.slot)] and stream.deaths == 0


def test_a_request_that_no_worker_has_begun_is_not_blamed(it) -> None:
    it.group.came_up()
    streams = [it.submit() for _ in range(FULL + 1)]
    for _ in range(SUSPECT_DEATHS):
        it.begin(*streams[:RUNNING])
        it.restart()
    assert {stream.deaths for stream in streams[:RUNNING]} == {SUSPECT_DEATHS}
    assert {stream.deaths for stream in streams[RUNNING:]} == {0}


def test_a_streams_first_start_is_kept_through_restarts(it) -> None:
    it.group.came_up()
    stream = it.submit()
    for _ in range(2):
        it.begin(stream)
        it.restart()
        assert stream.first_started == 1
