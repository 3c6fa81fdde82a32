"""How the ranks of a group come to apply the same things: both means, with threads in the place of processes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from backend_lib.arena import LEAD_SHARE, MAX_EVENTS, Arena, CommandKind, Doorbell, Event
from backend_lib.request import FinishReason
from backend_lib.worker.agreement import (
    Agreement,
    FollowingAgreement,
    LeadingAgreement,
    Outlook,
    SoloAgreement,
    StepDecision,
    ended,
)
from backend_lib.worker.broadcast import BroadcastFollower, BroadcastLeader
from tests.support.arena import close, new_arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = new_arena(num_groups=1, num_ranks=2, ring_records=16)
    yield arena
    close(arena)


class Wire:
    """One end sends, the other receives, each word in order."""

    def __init__(self) -> None:
        self.words: queue.Queue[np.ndarray] = queue.Queue()

    def sending(self, words: np.ndarray) -> Callable[[], np.ndarray]:
        self.words.put(words.copy())
        return lambda: words

    def receiving(self, words: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: self.words.get(timeout=5)


class End:
    def __init__(self, start_broadcast) -> None:
        self.start_broadcast = start_broadcast


class Pair:
    """Both ranks; `found` is what rank 0 will find out."""

    def __init__(self, arena: Arena, means: str) -> None:
        self.arena, self.ring = arena, arena.ring(0)
        self.bells = [Doorbell(), Doorbell()]
        self.found: list[Event] = []
        outlook = Outlook(arena.ring(0), self._take_found)
        self.leader: Agreement = LeadingAgreement(outlook, self.bells, arena.decisions(0), patience=1)
        self.follower: Agreement = FollowingAgreement(arena.ring(0), self.bells, arena.decisions(0), 1)
        if means == "broadcast":
            wire = Wire()
            self.leader = BroadcastLeader(self.leader, End(wire.sending))
            self.follower = BroadcastFollower(self.follower, End(wire.receiving))

    def _take_found(self) -> list[Event]:
        found, self.found[:] = self.found[:], []
        return found

    def post(self, slot: int) -> None:
        self.ring.post(CommandKind.ADMIT, slot, 1)
        self.bells[0].ring()

    def step(self, *, block: bool, busy: bool) -> tuple[StepDecision, StepDecision]:
        """One pass of both."""
        decisions = []
        for rank in (self.leader, self.follower):
            decision = rank.receive(block=block)
            rank.applied(decision)
            rank.announce(busy=busy)
            decisions.append(decision)
        return decisions[0], decisions[1]


@pytest.fixture(params=["arena", "broadcast"])
def pair(arena, request) -> Pair:
    return Pair(arena, request.param)


def slots(decision: StepDecision) -> list[int]:
    return [command.slot for command in decision.commands]


def test_both_apply_the_same_commands_in_the_same_step(pair):
    seen: tuple[list[int], list[int]] = ([], [])
    for number in range(40):
        if number % 3 != 1:
            pair.post(number)
        own, other = pair.step(block=number == 0, busy=True)
        assert own == other
        for list_, decision in zip(seen, (own, other), strict=True):
            list_ += slots(decision)
    pair.step(block=False, busy=False)
    expected = [number for number in range(40) if number % 3 != 1]
    assert seen[0] == seen[1] and seen[0][: len(expected) - 1] == expected[: len(expected) - 1]
    assert pair.ring.passed_by_all(pair.ring.head)


def test_a_command_that_comes_after_the_decision_waits_for_the_next(pair):
    """The follower sees it in the ring, and must leave it."""
    pair.post(1)
    own = pair.leader.receive(block=True)
    pair.post(2)
    other = pair.follower.receive(block=True)
    assert slots(own) == slots(other) == [1]
    for rank, decision in ((pair.leader, own), (pair.follower, other)):
        rank.applied(decision)
        rank.announce(busy=True)
    own, other = pair.step(block=False, busy=True)
    assert slots(own) == slots(other) == [2]


def test_events_are_told_in_order_and_as_many_as_fit(pair):
    events = [ended(slot, 1, FinishReason.GRAMMAR) for slot in range(MAX_EVENTS + 5)]
    pair.found += events
    pair.post(1)
    told = []
    for number in range(4):
        own, other = pair.step(block=number == 0, busy=True)
        assert own == other and len(own.events) <= MAX_EVENTS
        told += own.events
    assert told == events


def test_what_rank_0_tells_is_in_its_next_decision(pair):
    pair.post(1)
    pair.step(block=True, busy=True)
    event = ended(1, 1, FinishReason.ERROR)
    pair.leader.tell(event)
    told = [decision.events for _ in range(2) for decision in pair.step(block=False, busy=True)]
    assert sorted(map(len, told)) == [0, 0, 1, 1]
    with pytest.raises(AssertionError):
        pair.follower.tell(event)


def test_an_idle_group_is_woken_by_a_command(pair):
    """Also when what had been decided one step ahead turns out to be nothing."""
    pair.post(1)
    pair.step(block=True, busy=True)
    got: dict[str, StepDecision] = {}

    def wait(name: str, rank: Agreement) -> None:
        got[name] = rank.receive(block=True)

    threads = [
        threading.Thread(target=wait, args=each, daemon=True)
        for each in vars(pair).items()
        if each[0] in ("leader", "follower")
    ]
    for thread in threads:
        thread.start()
    threads[0].join(0.2)
    assert not got
    pair.post(2)
    for thread in threads:
        thread.join(5)
    assert slots(got["leader"]) == slots(got["follower"]) == [2]


def test_rank_0_leaves_commands_in_the_ring_while_another_rank_is_far_behind(pair):
    """Whoever gives up a sequence that it has computed gets another: a ring would fill up for the last of the ranks."""
    lead = 16 // LEAD_SHARE
    taken: list[int] = []
    for number in range(3 * lead):
        pair.post(number)
        decision = pair.leader.receive(block=False)
        pair.leader.applied(decision)
        pair.leader.announce(busy=True)
        taken += slots(decision)
    assert taken == list(range(lead))


def test_rank_0_that_waits_for_another_rank_goes_on_when_that_has_caught_up(arena):
    pair, lead = Pair(arena, "arena"), 16 // LEAD_SHARE
    for number in range(lead + 1):
        pair.post(number)
    own = pair.leader.receive(block=True)
    pair.leader.applied(own)
    got: list[StepDecision] = []
    thread = threading.Thread(target=lambda: got.append(pair.leader.receive(block=True)), daemon=True)
    thread.start()
    thread.join(0.2)
    assert slots(own) == list(range(lead)) and not got
    pair.follower.applied(pair.follower.receive(block=True))
    thread.join(5)
    assert slots(got[0]) == [lead]


def test_a_group_of_one_waits_only_when_told_to(arena):
    ring, bell = arena.ring(0), Doorbell()
    solo = SoloAgreement(Outlook(ring), bell)
    assert solo.receive(block=False) == StepDecision([], [])
    ring.post(CommandKind.ADMIT, 3, 1)
    bell.ring()
    decision = solo.receive(block=True)
    assert slots(decision) == [3] and ring.cursor(0) == 0
    solo.applied(decision)
    assert ring.cursor(0) == ring.head
