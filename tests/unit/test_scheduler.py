"""What the scheduler does, one promise at a time; tests/unit/test_scheduler_machine.py has random lives."""

from __future__ import annotations

import numpy as np
import pytest

from backend_lib.request import FinishReason
from backend_lib.worker import scheduler as scheduler_module
from backend_lib.worker.scheduler import Plan, Scheduler
from backend_lib.worker.sequence import Sequence
from tests.support.scheduling import EOS, OTHER, WORD, Player, new_sequence


def new_scheduler(*, kv_tokens: int = 64, max_running: int = 3, prefill_chunk: int = 8) -> Scheduler:
    return Scheduler(kv_tokens=kv_tokens, max_running=max_running, max_model_len=64, prefill_chunk=prefill_chunk)


@pytest.fixture
def everything_fits(monkeypatch) -> None:
    """The estimate lets anything start, so that pauses must repair it."""
    monkeypatch.setattr(scheduler_module, "peak", lambda held, remaining: 0)


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
    assert not gone and scheduler.memory.num_used == 5  # 4 of the prompt and 1 that the second step writes
    third, gone = step_with(scheduler, second)
    assert [sequence.slot for sequence in gone] == [0] and not third.chunks
    assert scheduler.memory.num_used == 0 and scheduler.idle


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


def test_what_does_not_fit_is_overtaken_by_what_does() -> None:
    scheduler = new_scheduler(kv_tokens=20, prefill_chunk=32)
    for slot, prompt_len in enumerate([10, 12, 1]):
        scheduler.add(new_sequence(slot, prompt_len, 4))
    plan = scheduler.plan()
    assert [sequence.slot for sequence in plan.started] == [0, 2]
    assert [sequence.overtaken for sequence in scheduler.waiting] == [1]


def test_nothing_is_overtaken_for_ever(monkeypatch) -> None:
    """The short ones keep coming; after so many of them the long one is waited for."""
    monkeypatch.setattr(scheduler_module, "MAX_OVERTAKEN", 5)
    player = Player(new_scheduler(kv_tokens=30, prefill_chunk=32), overlap=True)
    player.scheduler.add(new_sequence(0, 10, 3))
    player.step()
    player.scheduler.add(new_sequence(1, 27, 4))
    started = []
    for slot in range(2, 30):
        player.scheduler.add(new_sequence(slot, 2, 3))
        started += [sequence.slot for sequence in player.step().started]
    assert started[:7] == [2, 3, 4, 5, 6, 1, 7]


def test_only_so_many_are_passed_over_at_a_time() -> None:
    scheduler = new_scheduler(kv_tokens=20, prefill_chunk=32)
    scheduler.add(new_sequence(0, 10, 4))
    for slot in range(1, 10):
        scheduler.add(new_sequence(slot, 12 if slot < 9 else 1, 4))
    assert [sequence.slot for sequence in scheduler.plan().started] == [0]


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


OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])


def slots(sequences: list[Sequence]) -> list[int]:
    return [sequence.slot for sequence in sequences]


@OVERLAP
@pytest.mark.parametrize("prompt_len, max_tokens", [(16, 1), (15, 2), (1, 16)])
def test_a_sequence_may_fill_the_memory_exactly(overlap: bool, prompt_len: int, max_tokens: int) -> None:
    player = Player(new_scheduler(kv_tokens=16, prefill_chunk=5), overlap=overlap)
    for slot in range(3):
        player.scheduler.add(new_sequence(slot, prompt_len, max_tokens))
    player.run(60)
    assert [(each.slot, each.output_len) for each in player.left] == [(slot, max_tokens) for slot in range(3)]


@OVERLAP
def test_what_was_computed_before_is_not_computed_again(overlap: bool) -> None:
    player = Player(new_scheduler(prefill_chunk=16), overlap=overlap)
    player.scheduler.add(new_sequence(0, [7, 8, 9], 4))
    player.run(20)
    player.scheduler.add(new_sequence(1, [7, 8, 9, WORD, WORD, 3, 4], 2))
    player.scheduler.add(new_sequence(2, [7, 8, 9], 2))  # the last token of a prompt is always computed
    player.scheduler.add(new_sequence(3, [7, 8, 9], 2, adapter_id=1))
    plan = player.step()
    assert [(chunk.start, chunk.length) for chunk in plan.chunks] == [(5, 2), (2, 1), (0, 3)]


def test_without_the_cache_nothing_is_read_and_nothing_left() -> None:
    player = Player(new_scheduler(), overlap=True)
    player.scheduler.add(new_sequence(0, [7, 8, 9], 2, use_cache=False))
    player.run(20)
    assert player.scheduler.memory.cache.num_tokens == 0
    player.scheduler.add(new_sequence(1, [7, 8, 9], 2))
    player.run(20)
    player.scheduler.add(new_sequence(2, [7, 8, 9], 2, use_cache=False))
    assert player.step().chunks[0].start == 0


def test_a_prompt_is_shared_once_the_step_that_completes_it_is_planned() -> None:
    player = Player(new_scheduler(prefill_chunk=8), overlap=True)
    player.scheduler.add(new_sequence(0, [3] * 12, 4))
    player.step()
    assert player.scheduler.memory.cache.num_tokens == 0
    player.step()
    assert player.scheduler.memory.cache.num_tokens == player.scheduler.memory.num_locked == 12
    player.scheduler.add(new_sequence(1, [3] * 12, 4))
    assert player.step().chunks[-1][1:] == (11, 1, True)


@OVERLAP
def test_two_that_compute_the_same_prompt_do_not_hold_it_twice(overlap: bool) -> None:
    """Memory for both at first and for the longer one at last, but not for a second copy beside it."""
    player = Player(new_scheduler(kv_tokens=25, prefill_chunk=32), overlap=overlap)
    player.scheduler.add(new_sequence(0, [3] * 10, 2))
    player.scheduler.add(new_sequence(1, [3] * 10, 10))
    assert slots(player.step().started) == [0, 1]
    player.run(30)
    assert slots(player.left) == [0, 1] and player.scheduler.num_pauses == 0


def test_a_sibling_starts_in_the_step_after_its_leaders_prompt() -> None:
    player = Player(new_scheduler(prefill_chunk=8), overlap=True)
    leader = new_sequence(0, [3] * 20, 4)
    player.scheduler.add(leader)
    for slot in (1, 2):
        player.scheduler.add(new_sequence(slot, [3] * 20, 4, leader=leader))
    plans = [player.step() for _ in range(4)]
    assert [slots(plan.started) for plan in plans] == [[0], [], [], [1, 2]]
    assert [len(sequence.cached_indices) for sequence in plans[3].started] == [19, 19]


def test_a_sibling_starts_when_its_leader_is_no_more() -> None:
    player = Player(new_scheduler(prefill_chunk=8), overlap=False)
    leader = new_sequence(0, [3] * 20, 4)
    player.scheduler.add(leader)
    player.scheduler.add(new_sequence(1, [3] * 20, 4, leader=leader))
    player.step()
    assert player.scheduler.abort(0, 1) is leader
    plan = player.step()
    assert slots(plan.started) == [1] and plan.chunks[0].start == 8  # what the leader has computed is not lost


def test_another_request_overtakes_a_sibling_that_waits_for_its_leader() -> None:
    player = Player(new_scheduler(prefill_chunk=8), overlap=True)
    leader = new_sequence(0, [3] * 12, 4)
    for sequence in (leader, new_sequence(1, [3] * 12, 4, leader=leader), new_sequence(2, 3, 4)):
        player.scheduler.add(sequence)
    assert [slots(player.step().started) for _ in range(3)] == [[0], [2], [1]]


@OVERLAP
def test_the_newest_pauses_and_goes_on_from_its_last_token(everything_fits, overlap: bool) -> None:
    player = Player(new_scheduler(kv_tokens=24, prefill_chunk=32), overlap=overlap)
    for slot in range(2):
        player.scheduler.add(new_sequence(slot, 8, 8))
    while not player.scheduler.paused:
        player.step()
    (paused,) = player.scheduler.paused
    assert (paused.slot, paused.row, paused.num_computed, paused.pausing) == (1, -1, 0, False)
    assert paused.num_planned == paused.output_len > 0 and paused.known_len == 8 + paused.output_len
    assert player.scheduler.memory.cache.num_evictable == paused.num_lost  # what it has computed is kept while it may
    produced = paused.output_len
    while player.scheduler.paused:
        plan = player.step()
    assert plan.chunks[-1].start + plan.chunks[-1].length == 8 + produced
    player.run(30)
    assert slots(player.left) == [0, 1] and [each.output_len for each in player.left] == [8, 8]
    assert player.scheduler.num_pauses == 1


def test_no_more_pause_than_must(everything_fits) -> None:
    """One sequence's memory is enough for all the others' next tokens."""
    player = Player(new_scheduler(kv_tokens=360, max_running=8, prefill_chunk=999), overlap=True)
    for slot in range(8):
        player.scheduler.add(new_sequence(slot, 40, 20))
    while not player.scheduler.num_pauses:
        player.step()
    assert player.scheduler.num_pauses == 1
    for _ in range(2):
        player.step()
    assert player.scheduler.num_pauses == 1


@OVERLAP
def test_nothing_new_starts_while_one_is_paused_and_the_oldest_goes_on_first(everything_fits, overlap: bool) -> None:
    player = Player(new_scheduler(kv_tokens=30, max_running=8, prefill_chunk=99), overlap=overlap)
    for slot in range(5):
        player.scheduler.add(new_sequence(slot, 4, 12))
    while len(player.scheduler.paused) < 2:
        player.step()
    player.scheduler.add(new_sequence(9, 1, 1))
    resumed: list[int] = []
    while player.scheduler.waiting:
        oldest = slots(player.scheduler.paused[:1])
        started = slots(player.step().started)
        assert not started or started[:1] == oldest or not oldest
        resumed += started
    assert resumed[-1] == 9 and len(resumed) > 1
    player.run(99)
    assert len(player.left) == 6


def test_a_sequence_that_ends_while_it_pauses_is_over(everything_fits) -> None:
    player = Player(new_scheduler(kv_tokens=24, prefill_chunk=32), overlap=True)
    for slot in range(2):
        player.scheduler.add(new_sequence(slot, 8, 8))
    pausing = player.scheduler.waiting[1]
    while not player.scheduler.num_pauses:
        player.step(lambda: EOS if player.scheduler.num_pauses else OTHER)  # asked after the plan
    assert pausing.finish is FinishReason.EOS and pausing in player.left and not player.scheduler.paused


@OVERLAP
def test_a_paused_sequence_is_aborted_at_once(everything_fits, overlap: bool) -> None:
    player = Player(new_scheduler(kv_tokens=24, prefill_chunk=32), overlap=overlap)
    for slot in range(2):
        player.scheduler.add(new_sequence(slot, 8, 8))
    while not player.scheduler.paused:
        player.step()
    (paused,) = player.scheduler.paused
    assert player.scheduler.abort(1, 1) is paused and not player.scheduler.paused
    player.run(20)
    assert slots(player.left) == [0]


def test_what_was_evicted_during_a_pause_is_computed_again_and_counted(everything_fits) -> None:
    player = Player(new_scheduler(kv_tokens=16, prefill_chunk=32), overlap=True)
    for slot in range(2):
        player.scheduler.add(new_sequence(slot, 6, 11))
    player.run(60)
    assert player.scheduler.num_pauses == 1
    assert player.scheduler.num_recomputed == 7  # nothing of it was left when the first had ended


@OVERLAP
def test_prompts_that_take_all_memory_end_one_after_the_other(everything_fits, overlap: bool) -> None:
    player = Player(new_scheduler(kv_tokens=20, max_running=6, prefill_chunk=3), overlap=overlap)
    for slot in range(6):
        player.scheduler.add(new_sequence(slot, 18, 3))
    player.run(6 * (20 + 4))
    assert slots(player.left) == list(range(6)) and {each.output_len for each in player.left} == {3}


def test_many_of_the_same_prompt_hold_it_once() -> None:
    player = Player(new_scheduler(kv_tokens=80, max_running=16, prefill_chunk=64), overlap=True)
    player.scheduler.add(new_sequence(0, [3] * 30, 2))
    player.step()
    for slot in range(1, 16):
        player.scheduler.add(new_sequence(slot, [3] * 30, 2))
    assert len(player.step().started) == 15
    player.run(20)
    assert player.scheduler.num_pauses == 0


@OVERLAP
def test_the_oldest_prompt_goes_on_though_newer_ones_took_the_last_memory(everything_fits, overlap: bool) -> None:
    """The third takes what is kept for the second's first decode, which it does not need for itself."""
    player = Player(new_scheduler(kv_tokens=14, prefill_chunk=99), overlap=overlap)
    for slot, (prompt_len, max_tokens) in enumerate([(4, 2), (13, 2), (14, 1)]):
        player.scheduler.add(new_sequence(slot, prompt_len, max_tokens))
    player.run(30)
    assert slots(player.left) == [0, 1, 2] and player.scheduler.num_pauses == 1


def test_what_the_cache_has_kept_through_a_pause_is_not_counted_as_computed_again(everything_fits) -> None:
    player = Player(new_scheduler(kv_tokens=24, prefill_chunk=32), overlap=False)
    for slot in range(2):
        player.scheduler.add(new_sequence(slot, 8, 8))
    while not player.scheduler.paused:
        player.step()
    assert player.scheduler.abort(0, 1)
    player.run(20)
    assert slots(player.left) == [1] and player.scheduler.num_recomputed == 0


def test_a_cancelled_length_says_nothing_of_the_others() -> None:
    player = Player(new_scheduler(), overlap=False)
    for slot in range(40):
        player.scheduler.add(new_sequence(slot, 2, 20))
        player.step(lambda: EOS if slot < 18 else WORD)  # noqa: B023
        player.scheduler.abort(slot, 1)
    history = player.scheduler._history
    assert history is not None and list(history._lengths) == [1] * 18


def test_prompts_that_tell_log_probabilities_come_in_small_pieces(monkeypatch) -> None:
    """Each of their tokens takes a row of logits; prompts that tell none are not held up."""
    monkeypatch.setattr(scheduler_module, "PROMPT_LOGPROBS_PER_STEP", 5)
    scheduler = new_scheduler(prefill_chunk=20)
    told = [new_sequence(slot, 7, 2, prompt_logprobs=np.zeros(7), use_cache=False) for slot in (0, 1)]
    for sequence in (*told, new_sequence(2, 9, 2)):
        scheduler.add(sequence)
    pieces, previous = [], None
    for _ in range(4):
        previous, _ = step_with(scheduler, previous)
        pieces.append([(chunk.sequence.slot, chunk.length) for chunk in previous.chunks[previous.num_decodes :]])
    assert pieces == [[(0, 5), (2, 9)], [(0, 2), (1, 3)], [(1, 4)], []]


def test_what_starts_beside_one_that_ends_may_go_on_reading_what_that_one_read(everything_fits) -> None:
    """Then those indices do not come back: the next step's decodes must not count on them."""
    scheduler = new_scheduler(kv_tokens=19, max_running=5, prefill_chunk=16)
    player, prompt = Player(scheduler, overlap=True), list(range(7, 14))
    first = [new_sequence(0, 2, 6), new_sequence(1, prompt, 1), new_sequence(2, prompt, 4)]
    second = [new_sequence(3, 3, 3), new_sequence(4, prompt, 1)]
    for coming in (first, second):
        for sequence in coming:
            scheduler.add(sequence)
        player.step()
    player.run(40)
    assert [each.output_len for each in first + second] == [6, 1, 4, 3, 1]
