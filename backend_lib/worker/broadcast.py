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
from backend_lib.worker.agreement import FollowingAgreement, LeadingAgreement, StepDecision

Wait = Callable[[], np.ndarray]


class Channel(Protocol):
    def start_broadcast(self, words: np.ndarray) -> Wait:
        """Send int64 `words` from rank 0 to the others, whose own are overwritten. Returns at once; what it returns
        waits for them."""


class BroadcastLeader:
    """An `Agreement` of rank 0 (see `backend_lib.worker.agreement`)."""

    def __init__(self, arena: LeadingAgreement, channel: Channel) -> None:
        self._arena = arena
        self._channel = channel
        self._coming: tuple[StepDecision, Wait] | None = None
        self._step = 0

    def receive(self, *, block: bool) -> StepDecision:
        if self._coming:
            (decision, wait), self._coming = self._coming, None
            wait()
            if any(decision) or not block:
                return decision
        return self._arena.receive(block=block)

    def applied(self, decision: StepDecision) -> None:
        self._arena.applied(decision)

    def announce(self, *, busy: bool) -> None:
        if not busy:
            return
        decision = self._arena.outlook.look()
        self._step += 1
        packed = self._arena.outlook.decided(self._step, decision).pack()
        self._coming = decision, self._channel.start_broadcast(np.frombuffer(packed, dtype=np.int64).copy())

    def tell(self, event: Event) -> None:
        self._arena.tell(event)


class BroadcastFollower:
    """An `Agreement` of another rank."""

    def __init__(self, arena: FollowingAgreement, channel: Channel, num_words: int) -> None:
        self._arena = arena
        self._channel = channel
        self._num_words = num_words
        self._coming: Wait | None = None
        self._step = 0

    def receive(self, *, block: bool) -> StepDecision:
        if self._coming:
            decision = self._arena.follow(self._next(self._coming))
            self._coming = None
            if any(decision) or not block:
                return decision
        return self._arena.receive(block=block)

    def applied(self, decision: StepDecision) -> None:
        self._arena.applied(decision)

    def announce(self, *, busy: bool) -> None:
        if busy:
            self._coming = self._channel.start_broadcast(np.zeros(self._num_words, dtype=np.int64))

    def tell(self, event: Event) -> None:
        self._arena.tell(event)

    def _next(self, wait: Wait) -> Decision:
        decision = Decision.unpack(wait().tobytes())
        self._step += 1
        if decision is None or decision.step != self._step:
            raise RuntimeError(f"decision {self._step} came as {decision}")
        return decision
