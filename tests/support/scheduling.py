"""Plays the loop and the device around a scheduler: every read is checked for what a real forward would find there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain

import numpy as np

from backend_lib.worker.prefix_cache import Node, PrefixCache
from backend_lib.worker.scheduler import Plan, Scheduler
from backend_lib.worker.sequence import Sequence

EOS, WORD, OTHER = 1, 5, 6


def new_sequence(slot: int, prompt: int | list[int], max_tokens: int, *, published: int = 0, **fields) -> Sequence:
    """A prompt given as a length is made of ids that no other length or slot shares."""
    prompt_ids = np.arange(prompt) + 1000 * (slot + 1) if isinstance(prompt, int) else np.array(prompt)
    return Sequence(
        slot=slot, prompt_ids=prompt_ids.astype(np.int32), output_ids=np.full(max_tokens, WORD, dtype=np.int32),
        max_tokens=max_tokens, output_len=published, **{"generation": 1, "eos_token_ids": frozenset({EOS})} | fields,
    )  # fmt: skip


class Flight:
    """A plan that runs: what its step reads and writes. `reads`: the KV indices of each chunk, in order."""

    def __init__(self, plan: Plan, scheduler: Scheduler) -> None:
        self.plan = plan
        self.rows = {chunk.sequence.row for chunk in plan.chunks}
        table = scheduler.memory.kv.table
        self.reads = [table[chunk.sequence.row, : chunk.start + chunk.length].tolist() for chunk in plan.chunks]
        self.indices = {index for indices in self.reads for index in indices}
        self.cached = [(sequence.row, sequence.cached_indices) for sequence in plan.started]


class Device:
    """KV memory as a device has it: what stands at an index is the whole prefix that was computed there."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._table = np.full_like(scheduler.memory.kv.table, -1)
        self._kv: dict[int, tuple[int, ...]] = {}
        self._ids: dict[int, list[int]] = {}

    def run(self, flight: Flight, next_token: Callable[[], int]) -> list[int]:
        """The step's tokens; a sequence's own are kept here, for the CPU may drop what came too late."""
        for row, indices in flight.cached:
            self._table[row] = -1
            self._table[row, : len(indices)] = indices
        plan = flight.plan
        self._table[plan.rows, plan.positions] = plan.kv_index
        for chunk, reads in zip(plan.chunks, flight.reads, strict=True):
            self._write(chunk.sequence, chunk.start, reads)
        for chunk, reads in zip(plan.chunks, flight.reads, strict=True):
            assert self._table[chunk.sequence.row, : len(reads)].tolist() == reads
            self._check(chunk.sequence, reads)
        return [self._sample(chunk.sequence, next_token()) for chunk in plan.chunks if chunk.samples]

    def _known(self, sequence: Sequence) -> list[int]:
        begin = [*sequence.prompt_ids.tolist(), *sequence.output_ids[: sequence.output_len].tolist()]
        return self._ids.setdefault(sequence.slot, begin)

    def _prefix(self, sequence: Sequence, length: int) -> tuple[int, ...]:
        ids = self._known(sequence)
        assert length <= len(ids), "a token is computed before it was sampled"
        return (sequence.adapter_id, *ids[:length])

    def _write(self, sequence: Sequence, start: int, reads: list[int]) -> None:
        for position in range(start, len(reads)):
            self._kv[reads[position]] = self._prefix(sequence, position + 1)

    def _check(self, sequence: Sequence, reads: list[int]) -> None:
        for position, index in enumerate(reads):
            assert self._kv[index] == self._prefix(sequence, position + 1), "another's keys and values are read"

    def _sample(self, sequence: Sequence, token: int) -> int:
        self._known(sequence).append(token)
        return token


class Player:
    """The loop: with `overlap` a step is finalized after the next one has been planned."""

    def __init__(self, scheduler: Scheduler, *, overlap: bool) -> None:
        self.scheduler = scheduler
        self.overlap = overlap
        self.device = Device(scheduler)
        self.flight: Flight | None = None
        self.left: list[Sequence] = []

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self.flight is None

    def step(self, next_token: Callable[[], int] = lambda: WORD) -> Plan:
        before, waiting = self.flight, list(self.scheduler.waiting)
        plan = self.scheduler.plan()
        check_started(self.scheduler, plan, waiting)
        self.flight = Flight(plan, self.scheduler) if plan.chunks else None
        if before:
            check_fence(before, plan)
        check_memory(self.scheduler, self.flight, before)
        self._finalize(before, next_token)
        if not self.overlap:
            flight, self.flight = self.flight, None
            self._finalize(flight, next_token)
        check_memory(self.scheduler, self.flight)
        return plan

    def run(self, max_steps: int, next_token: Callable[[], int] = lambda: WORD) -> int:
        """Until nothing is left, in at most so many steps; how many it took."""
        for steps in range(max_steps):
            if self.idle:
                return steps
            self.step(next_token)
        assert self.idle, f"not over after {max_steps} steps"
        return max_steps

    def _finalize(self, flight: Flight | None, next_token: Callable[[], int]) -> None:
        if flight is None:
            return
        sampled = [chunk.sequence for chunk in flight.plan.chunks if chunk.samples]
        for sequence, token in zip(sampled, self.device.run(flight, next_token), strict=True):
            if not sequence.finish:
                sequence.accept(token)
        self.left += self.scheduler.finalize(flight.plan)


def check_started(scheduler: Scheduler, plan: Plan, waiting: list[Sequence]) -> None:
    """Nothing starts beside one that pauses; then the paused, the oldest first, and after the last of them what waits
    and has no leader to wait for."""
    resumed = [sequence for sequence in plan.started if sequence not in waiting]
    new = plan.started[len(resumed) :]
    assert not (plan.started and any(sequence.pausing for sequence in scheduler.running))
    assert not (new and scheduler.paused) and all(sequence in waiting for sequence in new)
    arrivals = [sequence.arrival for sequence in resumed + scheduler.paused]
    assert arrivals == sorted(arrivals)
    leaders = [sequence.leader for sequence in new if sequence.leader is not None]
    assert all(leader.finish or leader.output_len or leader.prompt_computed for leader in leaders)


def check_fence(before: Flight, plan: Plan) -> None:
    assert before.indices.isdisjoint(plan.kv_index.tolist()), "an index of a step in flight was handed out"
    assert before.rows.isdisjoint(sequence.row for sequence in plan.started), "a row of a step in flight was"


def nodes_of(cache: PrefixCache) -> list[Node]:
    pending = list(cache._roots.values())
    found = []
    while pending:
        node = pending.pop()
        found += [node] if node.parent is not None else []
        pending += node.children.values()
    return found


def path_to(node: Node | None) -> list[Node]:
    """A node and all above it, the root left out."""
    path = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path


def check_memory(scheduler: Scheduler, *flights: Flight | None) -> None:
    """Every index and row has one owner, every lock a reader, and what a step in flight uses is nobody else's."""
    memory, running = scheduler.memory, scheduler.running
    table = memory.kv.table
    nodes = nodes_of(memory.cache)
    free = memory.kv._free[: memory.kv.num_free].tolist()
    held = [table[each.row, each.num_shared : each.num_computed].tolist() for each in running]
    cached = [node.indices.tolist() for node in nodes]
    owned = Counter(chain(free, *held, *cached))
    assert owned == Counter(range(memory.num_tokens)), (owned, free, held, cached, running)
    assert memory.num_used == sum(map(len, held)) + memory.num_locked
    locks = Counter(node for each in running for node in path_to(each.node))
    assert {node: node.locks for node in nodes} == {node: locks[node] for node in nodes}
    for each in running:
        shared = [index for node in reversed(path_to(each.node)) for index in node.indices.tolist()]
        assert table[each.row, : each.num_shared].tolist() == shared[: each.num_shared] and each.row >= 0
    rows = scheduler._free_rows + [each.row for each in running]
    assert sorted(rows) == list(range(len(table)))
    evictable = [index for node in nodes if not node.locks for index in node.indices.tolist()]
    for flight in filter(None, flights):
        assert flight.indices.isdisjoint(free + evictable), "released while a step in flight holds it"
        assert flight.rows.isdisjoint(scheduler._free_rows)
