"""Rank 0's side of a slot: output ids, then the word that publishes them, then the dirty list, then the bell."""

from __future__ import annotations

import time

import numpy as np

from backend_lib.arena import DirtyList, Doorbell, SlotRef, SlotTable
from backend_lib.request import FinishReason
from backend_lib.worker.crash_points import reach
from backend_lib.worker.sequence import Sequence


class Publisher:
    """Collects what a step changed; `flush` makes it visible, in the order in which a reader may rely on it."""

    def __init__(self, slots: SlotTable, dirty: DirtyList, bell: Doorbell) -> None:
        self._slots = slots
        self._dirty = dirty
        self._bell = bell
        self._touched: dict[SlotRef, tuple[Sequence, bool]] = {}

    def token(self, sequence: Sequence) -> None:
        """The sequence has a new token and perhaps an end."""
        self._touched[SlotRef(sequence.slot, sequence.generation)] = (sequence, False)
        if sequence.output_len == 1:
            self._stamp("first_token_ns", sequence)
        finish = sequence.told_finish
        if finish:
            self._stamp("last_token_ns", sequence)
        if finish is FinishReason.ERROR:
            self._set_error(sequence.slot, sequence.error)

    def released(self, sequence: Sequence) -> None:
        """No step holds the sequence any more: its slot may be used again."""
        self._touched[SlotRef(sequence.slot, sequence.generation)] = (sequence, True)

    def started(self, sequence: Sequence) -> None:
        """The sequence has its row. A new worker stamps anew, which the router looks for; a pause does not."""
        if not sequence.num_pauses:
            self.begun(sequence.slot)
            self._slots.headers["cached_tokens"][sequence.slot] = len(sequence.cached_indices)

    def begun(self, slot: int) -> None:
        """From now on the worker's death may be this sequence's doing."""
        self._slots.headers["first_scheduled_ns"][slot] = np.uint64(time.time_ns())

    def failed(self, slot: int, generation: int, error: str, finish: FinishReason = FinishReason.ERROR) -> None:
        """A sequence that could not be prepared: an error, and nothing held."""
        self._set_error(slot, error)
        self._slots.publish(slot, generation, 0, finish, released=True)
        self._dirty.append([SlotRef(slot, generation)])
        self._bell.ring()

    def flush(self) -> None:
        if not self._touched:
            return
        for sequence, released in self._touched.values():
            self._slots.publish(
                sequence.slot, sequence.generation, sequence.told_len, sequence.told_finish, released=released
            )
            reach("half published")
        reach("published")
        self._dirty.append(list(self._touched))
        reach("listed")
        self._touched.clear()
        self._bell.ring()

    def _set_error(self, slot: int, words: str) -> None:
        self._slots.headers["error"][slot] = words.encode()[:200]

    def _stamp(self, name: str, sequence: Sequence) -> None:
        self._slots.headers[name][sequence.slot] = np.uint64(time.time_ns())
