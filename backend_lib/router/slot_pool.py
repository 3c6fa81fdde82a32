"""Which slots are free. The router's alone."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from backend_lib.arena import CommandRing


class _Retired(NamedTuple):
    slot: int
    ring: CommandRing
    last_command: int


class SlotPool:
    """Hands out slots, the longest unused first, each time under a new generation.

    A retired slot comes back when every rank has read past the last command that names it.
    """

    def __init__(self, num_slots: int) -> None:
        self._lock = threading.Lock()
        self._free = deque(range(num_slots))
        self._retired: deque[_Retired] = deque()
        self._generation = 0

    def acquire(self) -> tuple[int, int] | None:
        """(slot, generation), or None when all are in use."""
        with self._lock:
            self._reclaim()
            if not self._free:
                return None
            self._generation += 1
            return self._free.popleft(), self._generation

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
