"""What each step computes. Pure bookkeeping: no tensors, no clock, no arena, so every rank comes to the same plan."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from backend_lib.config import PROMPT_LOGPROBS_PER_STEP
from backend_lib.request import FinishReason
from backend_lib.worker.admission import OutputHistory, peak
from backend_lib.worker.crash_points import reach
from backend_lib.worker.kv_memory import KvMemory
from backend_lib.worker.sequence import Sequence

# A sequence that does not fit may be overtaken this often, and at most so many may be passed over at a time.
MAX_OVERTAKEN = 64
MAX_PASSED_OVER = 8
# Steps after which what did not fit is looked at again though nothing has ended.
RETRY_STEPS = 16


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
    """Owns the waiting list, the rows and the KV memory of a group.

    Fence: a sequence that has ended or is to pause leaves the next plan at once, but its row and KV indices are given
    back only when the last step that held it has been finalized. So nothing that a step in flight reads or writes is
    handed out again.

    Reserve: after each plan one KV index is left for every row that goes on, or comes back before the next one, so
    the next plan's decodes never lack memory. Where that would fail, the newest sequences pause.
    """

    def __init__(
        self, *, kv_tokens: int, max_running: int, max_model_len: int, prefill_chunk: int, conservative: bool = False
    ) -> None:
        self.memory = KvMemory(num_tokens=kv_tokens, num_rows=max_running, max_len=max_model_len)
        self.running: list[Sequence] = []  # in the order in which they started; pausing ones until they have left
        self.waiting: list[Sequence] = []
        self.paused: list[Sequence] = []  # oldest first
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._prefill_chunk = prefill_chunk
        self._history = None if conservative else OutputHistory()
        self._by_slot: dict[tuple[int, int], Sequence] = {}
        self._next_step = 0
        self._finalized = -1
        self._changed = False  # something may start that could not before
        self._arrivals = 0
        self.num_pauses = 0
        self.num_recomputed = 0  # tokens whose KV was computed once more after a pause

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting or self.paused)

    def find(self, slot: int, generation: int) -> Sequence | None:
        return self._by_slot.get((slot, generation))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises ValueError when it can never start: it would keep all behind it waiting for ever."""
        if sequence.kv_need > self.memory.num_tokens:
            raise ValueError(
                f"the sequence needs room for {sequence.kv_need} tokens; the KV cache holds {self.memory.num_tokens}"
            )
        if sequence.leader_ref is not None:
            sequence.leader = self.find(*sequence.leader_ref)
        self._by_slot[sequence.slot, sequence.generation] = sequence
        self.waiting.append(sequence)
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self._changed = True

    def abort(self, slot: int, generation: int, finish: FinishReason = FinishReason.CANCELLED) -> Sequence | None:
        """End a sequence whatever its stage. Returns it when it is gone at once; None: unknown, or a step holds it."""
        sequence = self.find(slot, generation)
        if sequence is None or sequence.finish:
            return None
        sequence.finish = finish
        if sequence.last_step > self._finalized:
            return None
        self._forget(sequence)
        return sequence

    def plan(self) -> Plan:
        """Decode every running row, then fill the token budget with prompts, oldest first."""
        active, room = self._keep_reserve()
        decodes = [Chunk(sequence, sequence.num_computed, 1, True) for sequence in active if not sequence.prefilling]
        prefills, started = self._prefill_chunks(active, room)
        step, self._next_step = self._next_step, self._next_step + 1
        chunks = decodes + prefills
        rows, positions = _token_places(chunks, len(decodes))
        kv_index = self.memory.allocate(rows, positions)
        for chunk in chunks:
            self._advance(chunk, step)
        return Plan(
            step=step, chunks=chunks, num_decodes=len(decodes), rows=rows, positions=positions,
            kv_index=kv_index, started=started,
        )  # fmt: skip

    def finalize(self, plan: Plan) -> list[Sequence]:
        """Take back what sequences held that no later step holds: those that have ended, which are returned, and
        those that pause."""
        self._finalized = plan.step
        left = [chunk.sequence for chunk in plan.chunks if chunk.sequence.finish or chunk.sequence.pausing]
        gone = []
        for sequence in left:
            if sequence.last_step == plan.step:
                gone += self._leave(sequence)
        return gone

    # Decode, and the memory it needs.

    def _keep_reserve(self) -> tuple[list[Sequence], int]:
        """Pause the newest until there is memory for this step's decodes and the next one's.

        The oldest always goes on, so that something always ends. Returns those that go on, in the order in which they
        started, and the KV indices that prompts may take in this step.
        """
        active, leaving = self._active()
        returning = sum(self.memory.returned_by(sequence) for sequence in leaving)
        wanted = sum(map(_wanted, active))
        while len(active) > 1 and wanted + _first_piece(active[0]) > self.memory.available + returning:
            newest = active.pop()
            wanted -= _wanted(newest)
            returning += self._pause(newest)
        num_decodes = sum(not sequence.prefilling for sequence in active)
        sure = sum(map(self.memory.held_by, leaving))
        return active, self.memory.available - max(num_decodes, wanted - sure)

    def _active(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running sequences that go on, and those that will be gone before the next plan: the last step that holds
        them is finalized until then."""
        active: list[Sequence] = []
        leaving: list[Sequence] = []
        for sequence in self.running:
            ends = sequence.finish or sequence.pausing or sequence.exhausted
            (leaving if ends else active).append(sequence)
        return active, leaving

    def _pause(self, sequence: Sequence) -> int:
        """Take a sequence out of the plans; the KV indices that come back before the next one."""
        self.num_pauses += 1
        sequence.pausing = True
        reach("paused")
        if sequence.last_step > self._finalized:
            return self.memory.returned_by(sequence)
        self._leave(sequence)
        return 0  # they are back already

    # Prompts, and what may start.

    def _prefill_chunks(self, active: list[Sequence], room: int) -> tuple[list[Chunk], list[Sequence]]:
        budget = self._prefill_chunk
        chunks: list[Chunk] = []
        started: list[Sequence] = []
        for sequence in active:
            if sequence.prefilling:
                budget, room = self._add_prefill(chunks, sequence, budget, room)
        while budget and self._may_start() and (next_one := self._next_to_start(room)):
            room -= self._start(next_one)
            started.append(next_one)
            budget, room = self._add_prefill(chunks, next_one, budget, room)
        return chunks, started

    def _add_prefill(self, chunks: list[Chunk], sequence: Sequence, budget: int, room: int) -> tuple[int, int]:
        """Plan as much of a prompt as token budget and memory allow; what is left of both."""
        left = sequence.known_len - sequence.num_computed
        keep = _first_decode(sequence)
        length = min(budget, left, room - keep, _told_budget(sequence, chunks))
        if length <= 0:
            return budget, room
        chunks.append(Chunk(sequence, sequence.num_computed, length, length == left))
        return budget - length, room - length - (keep if length == left else 0)

    def _may_start(self) -> bool:
        """Nothing starts beside a sequence that is about to pause. What did not fit is looked at again when something
        has been given back or has come, and now and then, for estimates change."""
        if not (self._free_rows and (self.paused or self.waiting)):
            return False
        worth_a_look = self._changed or self._next_step % RETRY_STEPS == 0
        return worth_a_look and not any(sequence.pausing for sequence in self.running)

    def _next_to_start(self, room: int) -> Sequence | None:
        """The sequence that starts now: a paused one before any other, else the first waiting one that fits."""
        if self.paused:
            candidates = self.paused[:1]
        else:
            candidates = list(islice(filter(_leader_ready, self.waiting), MAX_PASSED_OVER))
        held = np.array([max(each.known_len, each.num_computed) - each.num_shared for each in self.running], dtype=int)
        remaining = self._remaining(self.running)
        for sequence in candidates:
            if self._fits(sequence, room, held, remaining):
                return sequence
            if sequence.overtaken >= MAX_OVERTAKEN:
                break
        self._changed = False
        return None

    def _fits(self, sequence: Sequence, room: int, held: np.ndarray, remaining: np.ndarray) -> bool:
        """Whether a first piece of it fits now, and the peak stays within memory when it joins the running ones."""
        cached, pinned = self.memory.cached_for(sequence, self._next_step)
        if room - pinned <= _first_decode(sequence):
            return False
        if not self.running:
            return True
        joined = np.append(held, sequence.known_len - cached), np.append(remaining, self._remaining([sequence]))
        return self.memory.num_locked + pinned + peak(*joined) <= self.memory.num_tokens

    def _remaining(self, sequences: list[Sequence]) -> np.ndarray:
        """int64 [n], tokens that each will still produce, as far as the past tells."""
        produced = np.array([sequence.num_planned for sequence in sequences], dtype=np.int64)
        allowed = np.array([sequence.max_tokens for sequence in sequences], dtype=np.int64)
        return self._history.remaining(produced, allowed) if self._history else allowed - produced

    def _start(self, sequence: Sequence) -> int:
        """Give a sequence its row and the cached part of its prompt; indices that can no longer be evicted for it."""
        queue = self.paused if self.paused else self.waiting
        for passed in queue[: queue.index(sequence)]:
            passed.overtaken += 1
        queue.remove(sequence)
        sequence.row = self._free_rows.pop()
        self.running.append(sequence)
        before = self.memory.available
        self.memory.attach(sequence, self._next_step)
        self.num_recomputed += max(sequence.num_lost - sequence.num_computed, 0)
        return before - self.memory.available

    def _advance(self, chunk: Chunk, step: int) -> None:
        """Count the chunk as computed. Its token values are not needed for that."""
        sequence = chunk.sequence
        was_prefilling = sequence.prefilling
        sequence.num_computed += chunk.length
        sequence.num_planned += chunk.samples
        sequence.last_step = step
        if was_prefilling and chunk.samples:
            self.memory.share(sequence, step)
            self._changed = True  # siblings have waited for it

    # Ends.

    def _leave(self, sequence: Sequence) -> list[Sequence]:
        """The last step that held a sequence is over: forget it if it has ended, queue it again if it pauses."""
        if sequence.finish:
            self._forget(sequence)
            return [sequence]
        self._vacate(sequence)
        sequence.rewind()
        bisect.insort(self.paused, sequence, key=lambda each: each.arrival)
        return []

    def _forget(self, sequence: Sequence) -> None:
        del self._by_slot[sequence.slot, sequence.generation]
        if sequence.row < 0:
            (self.paused if sequence in self.paused else self.waiting).remove(sequence)
            self._changed = True
            return
        if self._history and sequence.finish is not FinishReason.CANCELLED:
            self._history.add(sequence.output_len)  # a cancelled length says nothing of the others
        self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.memory.release(sequence, self._next_step)
        self._free_rows.append(sequence.row)
        self._changed = True


def _leader_ready(sequence: Sequence) -> bool:
    """A sibling waits until the leader's prompt can be read, or the leader is no more."""
    leader = sequence.leader
    return leader is None or bool(leader.finish) or leader.output_len > 0 or leader.prompt_computed


def _wanted(sequence: Sequence) -> int:
    """KV indices that a sequence must find for this step's decode and the next one's. A prompt can wait."""
    return 0 if sequence.prefilling else min(2, sequence.max_tokens - sequence.num_planned)


def _first_piece(sequence: Sequence) -> int:
    """KV indices for the least that a prompt, if it is one, can go on by."""
    return 1 + _first_decode(sequence) if sequence.prefilling else 0


def _told_budget(sequence: Sequence, chunks: list[Chunk]) -> int:
    """Tokens of its prompt that may be planned beside these chunks."""
    if sequence.prompt_logprobs is None:
        return sequence.known_len
    told = sum(chunk.length for chunk in chunks if chunk.sequence.prompt_logprobs is not None)
    return PROMPT_LOGPROBS_PER_STEP - told


def _first_decode(sequence: Sequence) -> int:
    """KV indices kept for the step after a prompt's last piece: none when its first token is also its last."""
    return min(1, sequence.max_tokens - sequence.num_planned - 1)


def _token_places(chunks: list[Chunk], num_decodes: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [T] row and position of every token of the step."""
    rows = np.array([chunk.sequence.row for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    if num_decodes == len(chunks):
        return rows, starts
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    offsets = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
    return np.repeat(rows, lengths), np.repeat(starts, lengths) + offsets
