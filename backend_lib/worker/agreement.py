"""What every rank of a group applies before a step: the one thing their plans depend on.

Rank 0 looks at the ring and at what only it can know, decides, and tells the others, in one of two ways: through the
arena, or (`backend_lib.worker.broadcast`) by a collective.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, Protocol

from backend_lib.arena import MAX_EVENTS, Command, CommandRing, Decision, DecisionRing, Doorbell, Event
from backend_lib.request import FinishReason
from backend_lib.worker.crash_points import reach


class EventKind(IntEnum):
    """Of `Event.kind`: what rank 0 has found out about a sequence."""

    PREPARED = 1  # its grammar is compiled: it may start
    REFUSED = 2  # and here it is not: rank 0 has the words
    ENDED = 16  # and more by its finish: its grammar, which rank 0 alone follows, has ended it


def ended(slot: int, generation: int, finish: FinishReason) -> Event:
    return Event(EventKind.ENDED + finish, slot, generation)


class StepDecision(NamedTuple):
    """`commands` and then `events` are applied, in order, before the step is planned."""

    commands: list[Command]
    events: list[Event]


class Agreement(Protocol):
    def receive(self, *, block: bool) -> StepDecision:
        """What to apply now. `block`: nothing else to do, so wait until there is something."""

    def applied(self, decision: StepDecision) -> None:
        """Tell the router that this rank has read all it needs from the commands' slots."""

    def announce(self, *, busy: bool) -> None:
        """Between applying and launching. `busy`: a step is launched now or is under way."""

    def tell(self, event: Event) -> None:
        """Rank 0 alone has found something out, in a step that was under way: the next decision has it."""


class Outlook:
    """Rank 0's: what there is to decide on."""

    def __init__(self, ring: CommandRing, found: Callable[[], list[Event]] = list) -> None:
        """`found`: what others have found out since it was last asked. Whoever adds to that rings the bell."""
        self.ring = ring
        self.events: deque[Event] = deque()
        self._found = found

    def look(self) -> StepDecision:
        """All commands that have not been applied, unless another rank is too far behind, and as many events as a
        decision holds. A rank that has applied commands rings rank 0's bell."""
        self.events.extend(self._found())
        count = min(len(self.events), MAX_EVENTS)
        commands = self.ring.read(0)[: self.ring.room_to_lead]
        return StepDecision(commands, [self.events.popleft() for _ in range(count)])

    def decided(self, step: int, decision: StepDecision) -> Decision:
        through = decision.commands[-1].sequence if decision.commands else self.ring.cursor(0)
        return Decision(step, through, decision.events)


class SoloAgreement:
    """A group of one rank: it agrees with itself on whatever there is."""

    def __init__(self, outlook: Outlook, bell: Doorbell) -> None:
        self.outlook = outlook
        self._bell = bell

    def receive(self, *, block: bool) -> StepDecision:
        decision = self.outlook.look()
        while block and not any(decision):
            self._bell.wait()
            decision = self.outlook.look()
        if decision.commands:
            reach("commands read")
        return decision

    def applied(self, decision: StepDecision) -> None:
        move_cursor(self.outlook.ring, 0, decision)

    def announce(self, *, busy: bool) -> None: ...

    def tell(self, event: Event) -> None:
        self.outlook.events.append(event)


class LeadingAgreement(SoloAgreement):
    """Rank 0 of several: it publishes each decision in the arena and wakes the others."""

    def __init__(self, outlook: Outlook, bells: list[Doorbell], decisions: DecisionRing, *, patience: float) -> None:
        """`bells`: of all ranks. `patience`: seconds that a rank may be behind by as many steps as are kept."""
        super().__init__(outlook, bells[0])
        self._others = bells[1:]
        self._decisions = decisions
        self._patience = patience
        self._step = 0

    def receive(self, *, block: bool) -> StepDecision:
        decision = super().receive(block=block)
        self._step += 1
        self._decisions.publish(self.outlook.decided(self._step, decision), timeout=self._patience)
        reach("decided")
        for bell in self._others:
            bell.ring()
        return decision


class FollowingAgreement:
    """Another rank: it waits for each of rank 0's decisions."""

    def __init__(self, ring: CommandRing, bells: list[Doorbell], decisions: DecisionRing, rank: int) -> None:
        """`bells`: of all ranks."""
        self._ring = ring
        self._leader, self._bell = bells[0], bells[rank]
        self._decisions = decisions
        self._rank = rank

    def receive(self, *, block: bool) -> StepDecision:
        decision = self._decisions.next(self._rank)
        while decision is None:
            self._bell.wait()
            decision = self._decisions.next(self._rank)
        return self.follow(decision)

    def follow(self, decision: Decision) -> StepDecision:
        """The commands were published before they were decided on, so they can be read."""
        commands = [each for each in self._ring.read(self._rank) if each.sequence <= decision.through]
        return StepDecision(commands, decision.events)

    def applied(self, decision: StepDecision) -> None:
        move_cursor(self._ring, self._rank, decision)
        if decision.commands:
            self._leader.ring()

    def announce(self, *, busy: bool) -> None: ...

    def tell(self, event: Event) -> None:
        raise AssertionError("only rank 0 finds out what the others cannot")


def move_cursor(ring: CommandRing, rank: int, decision: StepDecision) -> None:
    if decision.commands:
        reach("commands applied")
        ring.advance(rank, decision.commands[-1].sequence)
        reach("cursor moved")
