"""What every rank of a group applies before a step: the one thing their plans depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from backend_lib.arena import Command, CommandRing, Doorbell
from backend_lib.worker.crash_points import reach


class Prepared(NamedTuple):
    """A sequence may start now, or, where there is an error in words, must end."""

    slot: int
    generation: int
    error: str


class StepDecision(NamedTuple):
    """`commands` and then what is `prepared` are applied, in order, before the step is planned."""

    commands: list[Command]
    prepared: list[Prepared]


class Agreement(Protocol):
    def receive(self, *, block: bool) -> StepDecision:
        """The commands to apply now. `block`: nothing else to do, so wait until there is one."""

    def applied(self, decision: StepDecision) -> None:
        """Tell the router that this rank has read all it needs from the commands' slots."""


class SoloAgreement:
    """A group of one rank: it agrees with itself on whatever the ring holds."""

    def __init__(
        self, ring: CommandRing, bell: Doorbell, rank: int = 0, *, prepared: Callable[[], list[Prepared]] = list
    ) -> None:
        """`prepared`: what has become so since the last call. Whoever adds to that rings the bell."""
        self._ring = ring
        self._bell = bell
        self._rank = rank
        self._prepared = prepared

    def receive(self, *, block: bool) -> StepDecision:
        decision = self._decide()
        while block and not any(decision):
            self._bell.wait()
            decision = self._decide()
        if decision.commands:
            reach("commands read")
        return decision

    def _decide(self) -> StepDecision:
        return StepDecision(self._ring.read(self._rank), self._prepared())

    def applied(self, decision: StepDecision) -> None:
        if decision.commands:
            reach("commands applied")
            self._ring.advance(self._rank, decision.commands[-1].sequence)
            reach("cursor moved")
