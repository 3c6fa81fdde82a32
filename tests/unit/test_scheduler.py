"""The scheduler against its promises, over random lives of sequences, with and without a step in flight."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend_lib.request import FinishReason
from backend_lib.worker.scheduler import Plan, Scheduler
from backend_lib.worker.sequence import Sequence

EOS, WORD = 1, 5


def new_sequence(slot: int, prompt_len: int, max_tokens: int, *, published: int = 0, generation: int = 1) -> Sequence:
    return Sequence(
        slot=slot, generation=generation, prompt_ids=np.arange(prompt_len, dtype=np.int32),
        output_ids=np.full(max_tokens, WORD, dtype=np.int32), max_tokens=max_tokens, output_len=published,
        eos_token_ids=frozenset({EOS}),
    )  # fmt: skip


def new_scheduler(*, kv_tokens: int = 64, max_running: int = 3, prefill_chunk: int = 8) -> Scheduler:
    return Scheduler(kv_tokens=kv_tokens, max_running=max_running, max_model_len=32, prefill_chunk=prefill_chunk)


class Flight:
    """A plan that runs: what its step reads and writes."""

    def __init__(self, plan: Plan, scheduler: Scheduler) -> None:
        self.plan = plan
        self.rows = {chunk.sequence.row for chunk in plan.chunks}
        self.indices = {
            int(index)
            for chunk in plan.chunks
            for index in scheduler.kv.table[chunk.sequence.row, : chunk.start + chunk.length]
        }


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the loop: adds and aborts between steps; with overlap a step is finalized after the next is planned."""

    @initialize(
        overlap=st.booleans(), kv_tokens=st.integers(16, 60), max_running=st.integers(1, 4), chunk=st.integers(1, 12)
    )
    def begin(self, overlap: bool, kv_tokens: int, max_running: int, chunk: int) -> None:
        self.scheduler = new_scheduler(kv_tokens=kv_tokens, max_running=max_running, prefill_chunk=chunk)
        self.overlap, self.chunk, self.max_running = overlap, chunk, max_running
        self.flight: Flight | None = None
        self.added: list[Sequence] = []
        self.aborted: set[int] = set()
        self.started: list[int] = []
        self.gone: list[int] = []
        self.computed: dict[int, int] = {}
        self.tokens: dict[int, int] = {}

    @rule(prompt_len=st.integers(1, 10), max_tokens=st.integers(1, 6), published=st.integers(0, 5))
    def add(self, prompt_len: int, max_tokens: int, published: int) -> None:
        sequence = new_sequence(len(self.added), prompt_len, max_tokens, published=min(published, max_tokens - 1))
        self.added.append(sequence)
        self.computed[sequence.slot] = 0
        self.tokens[sequence.slot] = sequence.output_len
        self.scheduler.add(sequence)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, len(self.added) - 1))
        held = self.flight is not None and any(chunk.sequence.slot == slot for chunk in self.flight.plan.chunks)
        over = bool(self.added[slot].finish)
        sequence = self.scheduler.abort(slot, 1)
        if not over:
            self.aborted.add(slot)
            assert (sequence is None) == held  # at once, unless a step holds it
        if sequence:
            self._leave(sequence)

    @rule(slot=st.integers(0, 50))
    def abort_of_another_generation(self, slot: int) -> None:
        assert self.scheduler.abort(slot, 2) is None

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        self._step(lambda: data.draw(st.sampled_from([WORD, WORD, WORD, EOS])))

    def _step(self, next_token) -> None:
        was_idle = self.scheduler.idle and self.flight is None
        plan = self.scheduler.plan()
        self._check(plan)
        assert plan.chunks or self.flight or was_idle, "stuck: something waits and nothing runs"
        before, self.flight = self.flight, Flight(plan, self.scheduler) if plan.chunks else None
        self._check_fence(before, plan)
        self._finalize(before, next_token)
        if not self.overlap:
            flight, self.flight = self.flight, None
            self._finalize(flight, next_token)

    def _check(self, plan: Plan) -> None:
        assert all(chunk.length == 1 and chunk.samples for chunk in plan.chunks[: plan.num_decodes])
        assert sum(chunk.length for chunk in plan.chunks[plan.num_decodes :]) <= self.chunk
        assert len({chunk.sequence.slot for chunk in plan.chunks}) == len(plan.chunks)
        places = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert not sequence.finish and chunk.start == self.computed[sequence.slot] and chunk.length > 0
            self.computed[sequence.slot] += chunk.length
            assert chunk.samples == (self.computed[sequence.slot] >= sequence.known_len)
            places += [(sequence.row, chunk.start + offset) for offset in range(chunk.length)]
        assert list(zip(plan.rows.tolist(), plan.positions.tolist(), strict=True)) == places
        assert [self.scheduler.kv.table[place] for place in places] == plan.kv_index.tolist()
        self.started += [sequence.slot for sequence in plan.started]
        waited = [slot for slot in range(len(self.added)) if slot in self.started or slot not in self.aborted]
        assert self.started == waited[: len(self.started)]  # first come, first served

    def _check_fence(self, before: Flight | None, plan: Plan) -> None:
        if before:
            assert before.indices.isdisjoint(plan.kv_index.tolist()), "an index of a step in flight was handed out"
            assert before.rows.isdisjoint(sequence.row for sequence in plan.started), "a row of a step in flight was"

    def _finalize(self, flight: Flight | None, next_token) -> None:
        if flight is None:
            return
        for chunk in flight.plan.chunks:
            if chunk.samples and not chunk.sequence.finish:
                chunk.sequence.accept(next_token())
                self.tokens[chunk.sequence.slot] += 1
        for sequence in self.scheduler.finalize(flight.plan):
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.finish and sequence.slot not in self.gone
        self.gone.append(sequence.slot)

    @invariant()
    def every_index_and_row_has_one_owner(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        kv, running = self.scheduler.kv, self.scheduler.running
        free = kv._free[: kv.num_free].tolist()
        held = [index for each in running for index in kv.table[each.row, : each.num_computed].tolist()]
        assert sorted(free + held) == list(range(kv.num_tokens))
        assert len(held) == kv.num_used
        rows = self.scheduler._free_rows + [sequence.row for sequence in running]
        assert sorted(rows) == list(range(self.max_running))
        if self.flight:
            assert self.flight.indices.isdisjoint(free), "released while a step in flight holds it"
            assert self.flight.rows.isdisjoint(self.scheduler._free_rows)

    @invariant()
    def what_runs_can_always_finish(self) -> None:
        if hasattr(self, "scheduler"):
            needs = sum(sequence.kv_need for sequence in self.scheduler.running)
            assert needs == self.scheduler._reserved <= self.scheduler.kv.num_tokens

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(1000):
            if self.scheduler.idle and self.flight is None:
                break
            self._step(lambda: WORD)
        assert self.scheduler.idle and self.flight is None
        self.every_index_and_row_has_one_owner()
        assert self.scheduler.kv.num_used == self.scheduler._reserved == len(self.scheduler._by_slot) == 0
        assert sorted(self.gone) == list(range(len(self.added)))
        for sequence in self.added:
            assert sequence.output_len == self.tokens[sequence.slot] <= sequence.max_tokens
            if sequence.slot not in self.aborted:
                full = sequence.output_len == sequence.max_tokens
                assert sequence.finish is FinishReason.EOS or (full and sequence.finish is FinishReason.LENGTH)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def step_with(scheduler: Scheduler, previous: Plan | None, token: int = WORD) -> tuple[Plan, list[Sequence]]:
    """Plan a step and finalize the one before it, as the overlapped loop does."""
    plan = scheduler.plan()
    if previous is None:
        return plan, []
    for chunk in previous.chunks:
        if chunk.samples and not chunk.sequence.finish:
            chunk.sequence.accept(token)
    return plan, scheduler.finalize(previous)


def test_a_sequence_that_ends_by_token_is_held_until_the_step_it_wasted_is_over() -> None:
    scheduler = new_scheduler()
    scheduler.add(new_sequence(0, 4, 10))
    first, _ = step_with(scheduler, None)
    second, gone = step_with(scheduler, first, EOS)
    assert second.chunks[0].sequence.finish is FinishReason.EOS
    assert not gone and scheduler.kv.num_used == 5  # 4 of the prompt and 1 that the second step writes
    third, gone = step_with(scheduler, second)
    assert [sequence.slot for sequence in gone] == [0] and not third.chunks
    assert scheduler.kv.num_used == 0 and scheduler.idle


def test_a_sequence_that_ends_by_length_wastes_no_step() -> None:
    scheduler = new_scheduler()
    scheduler.add(new_sequence(0, 4, 2))
    first, _ = step_with(scheduler, None)
    second, _ = step_with(scheduler, first)
    third, gone = step_with(scheduler, second)
    assert not third.chunks and [sequence.slot for sequence in gone] == [0]


@pytest.mark.parametrize("slot, at_once", [(0, False), (1, True)], ids=["in a step in flight", "between its chunks"])
def test_an_abort_waits_only_for_a_step_that_holds_the_sequence(slot: int, at_once: bool) -> None:
    scheduler = new_scheduler(prefill_chunk=4)
    scheduler.add(new_sequence(0, 2, 4))
    scheduler.add(new_sequence(1, 10, 4))
    scheduler.add(new_sequence(2, 10, 4))
    plan = scheduler.plan()  # 2 tokens of the first, 2 of the second
    assert [chunk.sequence.slot for chunk in plan.chunks] == [0, 1]
    following, _ = step_with(scheduler, plan)
    if at_once:
        scheduler.finalize(following)
    assert (scheduler.abort(slot, 1) is not None) == at_once
    assert scheduler.abort(slot, 1) is None


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    scheduler = new_scheduler(kv_tokens=20, prefill_chunk=32)
    for slot, prompt_len in enumerate([10, 12, 1]):
        scheduler.add(new_sequence(slot, prompt_len, 4))
    plan = scheduler.plan()
    assert [sequence.slot for sequence in plan.started] == [0]


def test_running_prompts_come_before_new_ones() -> None:
    scheduler = new_scheduler(prefill_chunk=8)
    scheduler.add(new_sequence(0, 12, 4))
    scheduler.add(new_sequence(1, 6, 4))
    scheduler.finalize(scheduler.plan())
    plan = scheduler.plan()
    assert [(chunk.sequence.slot, chunk.start, chunk.length, chunk.samples) for chunk in plan.chunks] == [
        (0, 8, 4, True),
        (1, 0, 4, False),
    ]


def test_decodes_do_not_take_from_the_prompts_budget() -> None:
    scheduler = new_scheduler(prefill_chunk=4)
    scheduler.add(new_sequence(0, 2, 4))
    first = scheduler.plan()
    first.chunks[0].sequence.accept(WORD)
    scheduler.finalize(first)
    scheduler.add(new_sequence(1, 10, 4))
    plan = scheduler.plan()
    assert plan.num_decodes == 1 and [chunk.length for chunk in plan.chunks] == [1, 4]


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    scheduler = new_scheduler(kv_tokens=16)
    scheduler.add(new_sequence(0, 10, 7))
    with pytest.raises(ValueError, match="needs room for 17 tokens; the KV cache holds 16"):
        scheduler.add(new_sequence(1, 10, 8))
    assert [chunk.sequence.slot for chunk in scheduler.plan().chunks] == [0]
