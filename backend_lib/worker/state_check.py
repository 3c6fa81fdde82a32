"""Proof that ranks hold the same state: with `debug: on` each writes digests of it after every step, and compares."""

from __future__ import annotations

import zlib
from collections import deque
from typing import NamedTuple

import numpy as np

from backend_lib.arena import Digests
from backend_lib.worker.scheduler import Scheduler


class State(NamedTuple):
    """32-bit digests, each of all steps so far: ranks that have differed once differ for good.

    Attributes:
        rows: which sequences run, wait and pause, and in which rows.
        lengths: how far each has come, and whether it has ended.
        kv: which indices are free and how the rows use the others, and what the prefix cache holds.
        ids: the tokens of the step that was finalized.
    """

    rows: int
    lengths: int
    kv: int
    ids: int


class Disagreement(RuntimeError):
    """Two ranks of a group do not hold the same state."""


class StateCheck:
    """One rank's. Steps count the loop's passes, which are as many on every rank."""

    def __init__(self, digests: Digests, rank: int) -> None:
        self._digests = digests
        self._rank = rank
        self._step = 0
        self._state = State(0, 0, 0, 0)
        self._own: deque[tuple[int, State]] = deque()  # not compared yet

    def check(self, scheduler: Scheduler, token_ids: list[int]) -> None:
        """Raises Disagreement naming the rank, the step and the part that differs first."""
        self._step += 1
        self._state = state_of(scheduler, token_ids, self._state)
        self._digests.write(self._rank, self._step, self._state)
        if self._rank:
            self._own.append((self._step, self._state))
            self._compare()

    def _compare(self) -> None:
        """With rank 0, as far as it has come, but for steps that it has overwritten: what differed then still does."""
        while self._own:
            step, own = self._own[0]
            other = self._digests.read(0, step, len(State._fields))
            if other is None and not self._digests.has_passed(0, step):
                return
            self._own.popleft()
            if other is None:
                continue
            differing = [name for name, mine, its in zip(State._fields, own, other, strict=True) if mine != its]
            if differing:
                raise Disagreement(f"rank {self._rank} and rank 0 differ after step {step} in {differing[0]}")


def state_of(scheduler: Scheduler, token_ids: list[int], before: State) -> State:
    everyone = [*scheduler.running, *scheduler.waiting, *scheduler.paused]
    kv, cache = scheduler.memory.kv, scheduler.memory.cache
    held = [kv.table[each.row, : each.num_computed] for each in scheduler.running]
    rows = [(each.slot, each.generation, each.row) for each in everyone]
    lengths = [(each.num_computed, each.num_planned, each.output_len, each.finish) for each in everyone]
    return State(
        rows=_digest(before.rows, [rows], len(scheduler.running)),
        lengths=_digest(before.lengths, [lengths]),
        kv=_digest(before.kv, [kv.free, *held], cache.num_locked, cache.num_evictable),
        ids=_digest(before.ids, [token_ids]),
    )


def _digest(before: int, parts: list, *numbers: int) -> int:
    digest = zlib.crc32(np.array(numbers, dtype=np.int64).tobytes(), before)
    for part in parts:
        digest = zlib.crc32(np.asarray(part, dtype=np.int64).tobytes(), digest)
    return digest
