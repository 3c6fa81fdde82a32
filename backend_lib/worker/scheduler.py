"""What each step computes. Pure bookkeeping: no tensors, no clock, no arena, so every rank comes to the same plan."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from backend_lib.request import FinishReason
from backend_lib.worker.kv_cache import KvCache
from backend_lib.worker.sequence import Sequence


class Chunk(NamedTuple):
    """`length` tokens of a sequence from position `start`. `samples`: the last of them is given a successor."""

    sequence: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One step: the first `num_decodes` chunks are decode rows, the others pieces of prompts.

    Attributes:
        rows, positions: int64 [T], of each of the T tokens.
        kv_index: int64 [T], where its key and value go.
        started: sequences that got their row in this step.
    """

    step: int
    chunks: list[Chunk]
    num_decodes: int
    rows: np.ndarray
    positions: np.ndarray
    kv_index: np.ndarray
    started: list[Sequence]


class Scheduler:
    """Owns the waiting list, the rows and the KV bookkeeping of a group.

    Fence: a sequence that has ended leaves the next plan at once, but its row and KV indices are given back only when
    the last step that held it has been finalized. So nothing that a step in flight reads or writes is handed out again.
    """

    def __init__(self, *, kv_tokens: int, max_running: int, max_model_len: int, prefill_chunk: int) -> None:
        self.kv = KvCache(num_tokens=kv_tokens, num_rows=max_running, max_len=max_model_len)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._reserved = 0  # KV indices that the running sequences may come to hold
        self._prefill_chunk = prefill_chunk
        self._by_slot: dict[tuple[int, int], Sequence] = {}
        self._next_step = 0
        self._finalized = -1

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError when it can never start: it would keep all behind it waiting for ever."""
        if sequence.kv_need > self.kv.num_tokens:
            raise ValueError(
                f"the sequence needs room for {sequence.kv_need} tokens; the KV cache holds {self.kv.num_tokens}"
            )
        self._by_slot[sequence.slot, sequence.generation] = sequence
        self.waiting.append(sequence)

    def abort(self, slot: int, generation: int) -> Sequence | None:
        """End a sequence whatever its stage. Returns it when it is gone at once; None: unknown, or a step holds it."""
        sequence = self._by_slot.get((slot, generation))
        if sequence is None or sequence.finish:
            return None
        sequence.finish = FinishReason.CANCELLED
        if sequence.last_step > self._finalized:
            return None
        self._release(sequence)
        return sequence

    def plan(self) -> Plan:
        """Decode every running row, then fill the token budget with prompts, oldest first."""
        decodes = self._decode_chunks()
        prefills, started = self._prefill_chunks()
        step, self._next_step = self._next_step, self._next_step + 1
        chunks = decodes + prefills
        for chunk in chunks:
            self._advance(chunk, step)
        rows, positions = _token_places(chunks, len(decodes))
        return Plan(
            step=step, chunks=chunks, num_decodes=len(decodes), rows=rows, positions=positions,
            kv_index=self.kv.allocate(rows, positions), started=started,
        )  # fmt: skip

    def finalize(self, plan: Plan) -> list[Sequence]:
        """Give back what sequences held that have ended and that no later step holds; returns them."""
        self._finalized = plan.step
        ended = [chunk.sequence for chunk in plan.chunks if chunk.sequence.finish]
        gone = [sequence for sequence in ended if sequence.last_step == plan.step]
        for sequence in gone:
            self._release(sequence)
        return gone

    def _decode_chunks(self) -> list[Chunk]:
        return [
            Chunk(sequence, sequence.num_computed, 1, True)
            for sequence in self.running
            if not (sequence.prefilling or sequence.finish or sequence.exhausted)
        ]

    def _prefill_chunks(self) -> tuple[list[Chunk], list[Sequence]]:
        budget = self._prefill_chunk
        chunks = []
        for sequence in self.running:
            if budget and sequence.prefilling and not sequence.finish:
                chunks.append(_prefill_chunk(sequence, budget))
                budget -= chunks[-1].length
        started = []
        while budget and self.waiting and self._fits(self.waiting[0]):
            started.append(self._start(self.waiting.popleft()))
            chunks.append(_prefill_chunk(started[-1], budget))
            budget -= chunks[-1].length
        return chunks, started

    def _fits(self, sequence: Sequence) -> bool:
        """A sequence starts when all it can ever hold is free, so that decode never lacks KV."""
        return bool(self._free_rows) and self._reserved + sequence.kv_need <= self.kv.num_tokens

    def _start(self, sequence: Sequence) -> Sequence:
        sequence.row = self._free_rows.pop()
        self._reserved += sequence.kv_need
        self.running.append(sequence)
        return sequence

    def _advance(self, chunk: Chunk, step: int) -> None:
        """Count the chunk as computed. Its token values are not needed for that."""
        sequence = chunk.sequence
        sequence.num_computed += chunk.length
        sequence.num_planned += chunk.samples
        sequence.last_step = step

    def _release(self, sequence: Sequence) -> None:
        del self._by_slot[sequence.slot, sequence.generation]
        if sequence.row < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.kv.free(sequence.row, sequence.num_computed)
        self._free_rows.append(sequence.row)
        self._reserved -= sequence.kv_need


def _prefill_chunk(sequence: Sequence, budget: int) -> Chunk:
    length = min(budget, sequence.known_len - sequence.num_computed)
    last = sequence.num_computed + length == sequence.known_len
    return Chunk(sequence, sequence.num_computed, length, last)


def _token_places(chunks: list[Chunk], num_decodes: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T] row and position of every token of the step."""
    rows = np.array([chunk.sequence.row for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    if num_decodes == len(chunks):
        return rows, starts
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    offsets = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return np.repeat(rows, lengths), np.repeat(starts, lengths) + offsets
