"""Agreement by a collective, as LightLLM's nodes agree: rank 0 broadcasts each decision while steps run.

A decision is enqueued on the device one step ahead, before the kernels of the step that runs while it travels; so when
it is needed it has long been there, and nobody waits for the device. An idle group has nothing enqueued: the arena
wakes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from backend_lib.arena import Decision, Event
from backend_lib.arena.layout import DECISION_BYTES
from backend_lib.worker.agreement import FollowingAgreement, LeadingAgreement, StepDecision
from backend_lib.worker.crash_points import reach

Wait = Callable[[], np.ndarray]


class Channel(Protocol):
    def start_broadcast(self, words: np.ndarray) -> Wait:
        """Send int64 `words` from rank 0 to the others, whose own are overwritten. Returns at once; what it returns
        waits for them."""


class _OneAhead:
    """An `Agreement` (see `backend_lib.worker.agreement`) whose next decision may be on its way; else the arena's."""

    def __init__(self, arena: LeadingAgreement | FollowingAgreement, channel: Channel) -> None:
        self._arena = arena
        self._channel = channel
        self._coming: Callable[[], StepDecision] | None = None
        self._step = 0

    def receive(self, *, block: bool) -> StepDecision:
        if self._coming:
            arrived, self._coming = self._coming, None
            decision = arrived()
            if any(decision) or not block:
                return decision
        return self._arena.receive(block=block)

    def applied(self, decision: StepDecision) -> None:
        self._arena.applied(decision)

    def announce(self, *, busy: bool) -> None:
        if busy:
            self._step += 1
            self._coming = self._enqueue(self._step)

    def tell(self, event: Event) -> None:
        self._arena.tell(event)

    def _enqueue(self, step: int) -> Callable[[], StepDecision]:
        """What waits for decision `step`, and returns it."""
        raise NotImplementedError


class BroadcastLeader(_OneAhead):
    """Rank 0."""

    _arena: LeadingAgreement

    def _enqueue(self, step: int) -> Callable[[], StepDecision]:
        decision = self._arena.outlook.look()
        packed = self._arena.outlook.decided(step, decision).pack()
        wait = self._channel.start_broadcast(np.frombuffer(packed, dtype=np.int64).copy())
        reach("decided")

        def arrived() -> StepDecision:
            wait()
            return decision

        return arrived


class BroadcastFollower(_OneAhead):
    """Another rank."""

    _arena: FollowingAgreement

    def _enqueue(self, step: int) -> Callable[[], StepDecision]:
        wait = self._channel.start_broadcast(np.zeros(DECISION_BYTES // 8, dtype=np.int64))

        def arrived() -> StepDecision:
            decision = Decision.unpack(wait().tobytes())
            if decision is None or decision.step != step:
                raise RuntimeError(f"decision {step} came as {decision}")
            return self._arena.follow(decision)

        return arrived
