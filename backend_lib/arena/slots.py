"""Slots: one record per sequence, with all that is needed to compute it, or to compute it again.

The router writes a slot's half before it posts ADMIT and never changes it while a worker may read it, but for
`client_finish`. Rank 0 writes the other half. What rank 0 has produced is published in one word, so that the length,
the reason and the release are always read together.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple

import numpy as np

from backend_lib.arena.layout import CLIENT_FINISH_WORD, PUBLISHED_WORD, SLOT, ArenaSpec, logprob_row
from backend_lib.request import FinishReason

_FINISH_SHIFT, _RELEASED_SHIFT, _GENERATION_SHIFT = 32, 40, 48
_GENERATION_MASK = 0xFFFF


class Published(NamedTuple):
    """What rank 0 has said of a sequence. `released` means that no step in flight holds it any more."""

    output_len: int
    finish: FinishReason
    released: bool


class SlotTable:
    def __init__(self, headers: np.ndarray, memory: mmap.mmap, words: memoryview, spec: ArenaSpec) -> None:
        self.headers = headers
        self._memory = memory
        self._words = words
        self._first_word = spec.slots_offset // 8
        self._heap = spec.heap_offset

    def __len__(self) -> int:
        return len(self.headers)

    def word(self, slot: int, word: int) -> int:
        return self._first_word + slot * (SLOT.itemsize // 8) + word

    # The router's half.

    def write(self, slot: int, fields: dict[str, Any]) -> None:
        """Fill the router's half and clear the rest, so that nothing of the last owner's stays behind (a verdict, an
        adapter). Only for a slot that no worker knows.
        """
        header = np.zeros((), dtype=SLOT)
        for name, value in fields.items():
            header[name] = value
        self.headers[slot] = header
        self.publish(slot, fields["generation"], 0, FinishReason.NONE, released=False)

    def client_finish(self, slot: int) -> FinishReason:
        return FinishReason(self._words[self.word(slot, CLIENT_FINISH_WORD)])

    def set_client_finish(self, slot: int, reason: FinishReason) -> None:
        """The router's verdict; it wins over the worker's, and a restarted worker is not given the slot again."""
        self._words[self.word(slot, CLIENT_FINISH_WORD)] = reason

    # The worker's half.

    def publish(self, slot: int, generation: int, output_len: int, finish: FinishReason, *, released: bool) -> None:
        """Make `output_len` output ids visible. The ids must have been written before."""
        self._words[self.word(slot, PUBLISHED_WORD)] = (
            output_len
            | finish << _FINISH_SHIFT
            | released << _RELEASED_SHIFT
            | (generation & _GENERATION_MASK) << _GENERATION_SHIFT
        )

    def published(self, slot: int, generation: int) -> Published | None:
        """What rank 0 has said of this generation of the slot; None when the word belongs to another one."""
        word = self._words[self.word(slot, PUBLISHED_WORD)]
        if word >> _GENERATION_SHIFT != generation & _GENERATION_MASK:
            return None
        finish = FinishReason(word >> _FINISH_SHIFT & 0xFF)
        return Published(word & 0xFFFFFFFF, finish, bool(word >> _RELEASED_SHIFT & 1))

    # The extent: parameter blob, prompt ids, output ids.

    def params(self, slot: int) -> bytes:
        at = self._heap + int(self.headers["params_offset"][slot])
        return self._memory[at : at + int(self.headers["params_bytes"][slot])]

    def write_params(self, slot: int, blob: bytes) -> None:
        at = self._heap + int(self.headers["params_offset"][slot])
        self._memory[at : at + len(blob)] = blob

    def prompt_ids(self, slot: int) -> np.ndarray:
        """int32 [prompt_len], a view of the arena."""
        header = self.headers[slot]
        return self._ids(header["prompt_offset"], header["prompt_len"])

    def output_ids(self, slot: int) -> np.ndarray:
        """int32 [max_tokens], a view of the arena; the first `output_len` of them are published."""
        header = self.headers[slot]
        return self._ids(header["output_offset"], header["max_tokens"])

    def logprobs(self, slot: int) -> np.ndarray | None:
        """[max_tokens] rows, a view of the arena: those of published tokens are there. None: not asked for."""
        header = self.headers[slot]
        return self._rows(header["logprob_offset"], header["max_tokens"], header["logprob_width"])

    def prompt_logprobs(self, slot: int) -> np.ndarray | None:
        """[prompt_len] rows, there with the first output token; the first is empty. None: not asked for."""
        header = self.headers[slot]
        return self._rows(header["prompt_logprob_offset"], header["prompt_len"], header["prompt_logprob_width"])

    def _rows(self, offset: int, count: int, width: int) -> np.ndarray | None:
        if not width:
            return None
        return np.frombuffer(
            self._memory, dtype=logprob_row(int(width)), count=int(count), offset=self._heap + int(offset)
        )

    def _ids(self, offset: int, count: int) -> np.ndarray:
        return np.frombuffer(self._memory, dtype=np.int32, count=int(count), offset=self._heap + int(offset))
