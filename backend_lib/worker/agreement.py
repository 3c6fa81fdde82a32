"""What every rank of a group applies before a step: the one thing their plans depend on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from backend_lib.arena import Command, CommandRing, Doorbell
from backend_lib.worker.crash_points import reach


class StepDecision(NamedTuple):
    """`commands` are applied, in order, before the step is planned."""

    commands: list[Command]


class Agreement(Protocol):
    def receive(self, *, block: bool) -> StepDecision:
        """The commands to apply now. `block`: nothing else to do, so wait until there is one."""

    def applied(self, decision: StepDecision) -> None:
        """Tell the router that this rank has read all it needs from the commands' slots."""


class SoloAgreement:
    """A group of one rank: it agrees with itself on whatever the ring holds."""

    def __init__(self, ring: CommandRing, bell: Doorbell, rank: int = 0) -> None:
        self._ring = ring
        self._bell = bell
        self._rank = rank

    def receive(self, *, block: bool) -> StepDecision:
        commands = self._ring.read(self._rank)
        while block and not commands:
            self._bell.wait()
            commands = self._ring.read(self._rank)
        if commands:
            reach("commands read")
        return StepDecision(commands)

    def applied(self, decision: StepDecision) -> None:
        if decision.commands:
            reach("commands applied")
            self._ring.advance(self._rank, decision.commands[-1].sequence)
            reach("cursor moved")
