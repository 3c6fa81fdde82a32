"""Which slots are free. The router's alone."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from backend_lib.arena import CommandRing, SlotRef


class _Retired(NamedTuple):
    slot: int
    ring: CommandRing
    last_command: int


class SlotPool:
    """Hands out slots, the longest unused first, each time under a new generation.

    A retired slot comes back when every rank has read past the last command that names it.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._lock = threading.Lock()
        self._free = deque(range(num_slots))
        self._retired: deque[_Retired] = deque()
        self._generation = 0

    def acquire(self, count: int = 1) -> list[SlotRef] | None:
        """That many slots, each under a generation of its own; None when fewer are free."""
        with self._lock:
            self._reclaim()
            if len(self._free) < count:
                return None
            first, self._generation = self._generation + 1, self._generation + count
            return [SlotRef(self._free.popleft(), first + place) for place in range(count)]

    @property
    def num_taken(self) -> int:
        """Slots in use: of sequences that wait, run, or have not been retired yet."""
        return self._num_slots - len(self._free) - len(self._retired)

    def give_back(self, slot: int) -> None:
        """Of a slot that no group has been given."""
        with self._lock:
            self._free.append(slot)

    def retire(self, slot: int, ring: CommandRing, last_command: int) -> None:
        """Give back a slot whose reply has been sent and that no step holds."""
        with self._lock:
            self._retired.append(_Retired(slot, ring, last_command))

    def _reclaim(self) -> None:
        for _ in range(len(self._retired)):
            retired = self._retired.popleft()
            if retired.ring.passed_by_all(retired.last_command):
                self._free.append(retired.slot)
            else:
                self._retired.append(retired)
