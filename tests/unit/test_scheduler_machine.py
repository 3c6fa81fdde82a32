"""The scheduler against its promises, over random lives of sequences, with and without a step in flight."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend_lib.request import FinishReason
from backend_lib.worker import admission
from backend_lib.worker import scheduler as scheduler_module
from backend_lib.worker.admission import OutputHistory
from backend_lib.worker.scheduler import Plan, Scheduler
from backend_lib.worker.sequence import Sequence
from tests.support.scheduling import EOS, OTHER, WORD, Player, check_memory, new_sequence

# Prompts begin like one of these, so that they are often each other's prefixes.
BEGINNINGS = ([5, 6, 5, 5, 6, 6, 5, 6, 5, 5, 6, 5], [5, 6, 5, 6, 6, 6, 6, 5, 5, 6, 5, 6])
PROMPTS = st.builds(
    lambda beginning, length, tail: beginning[:length] + tail,
    st.sampled_from(BEGINNINGS), st.integers(1, 12), st.lists(st.sampled_from([5, 6]), max_size=3),
)  # fmt: skip


def new_scheduler(*, kv_tokens: int = 64, max_running: int = 3, prefill_chunk: int = 8, **fields) -> Scheduler:
    return Scheduler(
        kv_tokens=kv_tokens, max_running=max_running, max_model_len=64, prefill_chunk=prefill_chunk, **fields
    )


def decodes_next(scheduler: Scheduler) -> list[Sequence]:
    """Those that the next plan decodes, unless something ends them before."""
    goes_on = [each for each in scheduler.running if not (each.finish or each.pausing)]
    return [each for each in goes_on if not (each.prefilling or each.exhausted)]


class SchedulerMachine(RuleBasedStateMachine):
    """Adds and aborts between steps. Bounds and history are small, so that all of them matter."""

    @initialize(
        overlap=st.booleans(), kv_tokens=st.integers(8, 50), max_running=st.integers(1, 5), chunk=st.integers(1, 12),
        min_history=st.sampled_from([1, 16]), conservative=st.booleans(),
        blind=st.booleans(),
    )  # fmt: skip
    def begin(
        self,
        overlap: bool,
        kv_tokens: int,
        max_running: int,
        chunk: int,
        min_history: int,
        conservative: bool,
        blind: bool,
    ) -> None:
        self.before = scheduler_module.MAX_OVERTAKEN, scheduler_module.MAX_PASSED_OVER, admission.MIN_HISTORY
        scheduler_module.MAX_OVERTAKEN, scheduler_module.MAX_PASSED_OVER, admission.MIN_HISTORY = 2, 2, min_history
        self.scheduler = new_scheduler(
            kv_tokens=kv_tokens, max_running=max_running, prefill_chunk=chunk, conservative=conservative
        )
        self.chunk = chunk
        if blind:  # whatever the estimate says
            self.scheduler._history = OutputHistory()
            self.scheduler._history.remaining = lambda produced, allowed: np.zeros_like(produced)
        self.player = Player(self.scheduler, overlap=overlap)
        self.added: list[Sequence] = []
        self.aborted: set[int] = set()
        self.gone: list[int] = []
        self.computed: dict[int, int] = {}

    @rule(
        prompt=PROMPTS, max_tokens=st.integers(1, 8), published=st.integers(0, 5), use_cache=st.sampled_from([1, 1, 0]),
        adapter=st.sampled_from([0, 0, 1]),
    )  # fmt: skip
    def add(self, prompt: list[int], max_tokens: int, published: int, use_cache: int, adapter: int) -> None:
        self._add(prompt, max_tokens, published=min(published, max_tokens - 1), use_cache=use_cache, adapter_id=adapter)

    @precondition(lambda self: self.added)
    @rule(max_tokens=st.integers(1, 8), data=st.data())
    def add_sibling(self, max_tokens: int, data) -> None:
        leader = self.added[data.draw(st.integers(0, len(self.added) - 1))]
        self._add(leader.prompt_ids.tolist(), max_tokens, leader=leader, adapter_id=leader.adapter_id)

    def _add(self, prompt: list[int], max_tokens: int, **fields) -> None:
        sequence = new_sequence(len(self.added), prompt, max_tokens, **fields)
        if len(prompt) + max_tokens - 1 > self.scheduler.memory.num_tokens:
            with pytest.raises(ValueError, match="needs room for"):
                self.scheduler.add(sequence)
        else:
            self.scheduler.add(sequence)
            self.added.append(sequence)

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def abort(self, data) -> None:
        slot = data.draw(st.integers(0, len(self.added) - 1))
        flight = self.player.flight
        held = flight is not None and any(chunk.sequence.slot == slot for chunk in flight.plan.chunks)
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
    def step(self, data) -> None:
        tokens = st.sampled_from([WORD, WORD, OTHER, EOS])
        self._step(lambda: data.draw(tokens))

    @rule(data=st.data(), steps=st.integers(2, 12), eos=st.booleans())
    def steps(self, data, steps: int, eos: bool) -> None:
        rng = random.Random(data.draw(st.integers(0, 9)))
        for _ in range(steps):
            self._step(lambda: rng.choice([WORD, WORD, WORD, OTHER, EOS if eos else WORD]))

    def _step(self, next_token) -> None:
        was_idle = self.player.idle
        in_flight = self.player.flight
        decoded = decodes_next(self.scheduler)
        assert self.scheduler.memory.available >= len(decoded)
        plan = self.player.step(next_token)
        assert plan.chunks or in_flight or was_idle, "stuck: something waits and nothing runs"
        self._check(plan)
        while self.player.left:
            self._leave(self.player.left.pop())

    def _check(self, plan: Plan) -> None:
        assert all(chunk.length == 1 and chunk.samples for chunk in plan.chunks[: plan.num_decodes])
        assert sum(chunk.length for chunk in plan.chunks[plan.num_decodes :]) <= self.chunk
        assert len({chunk.sequence.slot for chunk in plan.chunks}) == len(plan.chunks)
        for sequence in plan.started:
            self.computed[sequence.slot] = len(sequence.cached_indices)
            assert any(chunk.sequence is sequence for chunk in plan.chunks)
        for chunk in plan.chunks:
            assert chunk.start == self.computed[chunk.sequence.slot] and chunk.length > 0
            self.computed[chunk.sequence.slot] += chunk.length

    def _leave(self, sequence: Sequence) -> None:
        assert sequence.finish and sequence.slot not in self.gone
        self.gone.append(sequence.slot)

    @invariant()
    def memory_is_whole(self) -> None:
        if hasattr(self, "scheduler"):
            check_memory(self.scheduler, self.player.flight)

    @invariant()
    def nobody_is_overtaken_without_end(self) -> None:
        if hasattr(self, "scheduler"):
            assert all(each.overtaken <= 2 for each in self.added if each.leader is None)

    @invariant()
    def paused_stand_in_the_order_of_their_arrival(self) -> None:
        if hasattr(self, "scheduler"):
            arrivals = [each.arrival for each in self.scheduler.paused]
            assert arrivals == sorted(arrivals)
            assert all(each.row == -1 and not each.num_computed and not each.finish for each in self.scheduler.paused)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # The oldest goes on by a token a step at least, so all of them take no longer than one after the other.
        left = [each for each in self.added if each.slot not in self.gone]
        for _ in range(sum(each.kv_need + 4 for each in left) + 4):
            if not self.player.idle:
                self._step(lambda: WORD)
        assert self.player.idle, "not all of them have ended"
        scheduler_module.MAX_OVERTAKEN, scheduler_module.MAX_PASSED_OVER, admission.MIN_HISTORY = self.before
        memory = self.scheduler.memory
        assert memory.num_used == memory.num_locked == len(self.scheduler._by_slot) == 0
        memory.kv.give_back(memory.cache.clear())
        assert memory.kv.num_free == memory.num_tokens
        assert sorted(self.gone) == list(range(len(self.added)))
        for sequence in self.added:
            if sequence.slot not in self.aborted:
                full = sequence.output_len == sequence.max_tokens
                assert sequence.finish is FinishReason.EOS or (full and sequence.finish is FinishReason.LENGTH)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


class RandomLife:
    """Much of everything in too little memory: the same seed, the same life."""

    def __init__(self, seed: int, *, overlap: bool) -> None:
        self.rng = rng = random.Random(seed)
        self.kv_tokens = rng.randint(18, 60)
        self.player = Player(
            new_scheduler(kv_tokens=self.kv_tokens, max_running=rng.randint(2, 6), prefill_chunk=rng.randint(1, 12)),
            overlap=overlap,
        )
        self.added: list[Sequence] = []
        self.plans: list[tuple] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._commands()
            self.step()

    def step(self) -> None:
        plan = self.player.step(lambda: self.rng.choice([WORD, WORD, WORD, WORD, OTHER, OTHER, OTHER, EOS]))
        chunks = [(chunk.sequence.slot, *chunk[1:]) for chunk in plan.chunks]
        arrays = [plan.rows, plan.positions, plan.kv_index, *(each.cached_indices for each in plan.started)]
        started = [(each.slot, each.row) for each in plan.started]
        self.plans.append((plan.step, plan.num_decodes, chunks, started, [each.tobytes() for each in arrays]))

    def drain(self) -> None:
        left = [each for each in self.added if each not in self.player.left and not each.finish]
        for _ in range(sum(each.kv_need + 4 for each in left) + 4):
            if not self.player.idle:
                self.step()
        assert self.player.idle, "not all of them have ended"

    def _commands(self) -> None:
        rng = self.rng
        for _ in range(rng.choice([0, 0, 0, 1, 2]) if len(self.player.scheduler.waiting) < 8 else 0):
            prompt = rng.choice(BEGINNINGS)[: rng.randint(1, 12)] + rng.choices([5, 6], k=rng.randint(0, 2))
            fields = {"adapter_id": rng.choice([0, 0, 0, 1]), "use_cache": rng.random() < 0.8}
            if self.added and rng.random() < 0.2:
                fields["leader"] = leader = rng.choice(self.added[-4:])
                prompt = leader.prompt_ids.tolist()
            max_tokens = rng.randint(1, min(24, self.kv_tokens + 1 - len(prompt)))
            self.added.append(new_sequence(len(self.added), prompt, max_tokens, **fields))
            self.player.scheduler.add(self.added[-1])
        if self.added and rng.random() < 0.03:
            gone = self.player.scheduler.abort(rng.choice(self.added[-8:]).slot, 1)
            self.player.left += [gone] if gone else []


@pytest.fixture
def blind(monkeypatch) -> None:
    """The estimate lets anything start, so that pauses must repair it."""
    monkeypatch.setattr(scheduler_module, "peak", lambda held, remaining: 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_long_lives_in_too_little_memory(blind, overlap: bool) -> None:
    num_pauses = num_recomputed = 0
    for seed in range(25):
        life = RandomLife(seed, overlap=overlap)
        life.run(120)
        life.drain()
        scheduler = life.player.scheduler
        assert sorted(each.slot for each in life.player.left) == list(range(len(life.added)))
        assert scheduler.memory.num_used == 0
        for each in life.added:
            assert each.finish and (each.finish is not FinishReason.LENGTH or each.output_len == each.max_tokens)
        num_pauses += scheduler.num_pauses
        num_recomputed += scheduler.num_recomputed
    assert num_pauses > 300 and num_recomputed > 300


@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_two_ranks_make_the_same_plans(overlap: bool) -> None:
    """Fed the same commands and tokens. That plans depend on nothing else is what tensor parallel stands on."""
    for seed in range(5):
        lives = [RandomLife(seed, overlap=overlap) for _ in range(2)]
        for _ in range(150):
            for life in lives:
                life.run(1)
        assert lives[0].plans == lives[1].plans
        assert any(started for *_, started, _ in lives[0].plans)
