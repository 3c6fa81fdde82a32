"""A sequence: what it reads of its slot, how it goes on, and when it ends."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_lib.request import FinishReason
from backend_lib.worker.sequence import Sequence
from tests.support.arena import close, new_arena

EOS, STOP = 1, 7


def new_sequence(prompt_len: int = 3, max_tokens: int = 5, **fields) -> Sequence:
    return Sequence(
        slot=0, generation=1, prompt_ids=np.arange(100, 100 + prompt_len, dtype=np.int32),
        output_ids=np.zeros(max_tokens, dtype=np.int32), max_tokens=max_tokens,
        **{"eos_token_ids": frozenset({EOS}), "stop_token_ids": frozenset({STOP})} | fields,
    )  # fmt: skip


@given(st.integers(1, 8), st.integers(0, 6), st.data())
def test_known_ids_are_the_prompt_and_then_what_was_published(prompt_len: int, published: int, data) -> None:
    sequence = new_sequence(prompt_len, 10, output_len=published)
    sequence.output_ids[:published] = np.arange(200, 200 + published)
    known = [*range(100, 100 + prompt_len), *range(200, 200 + published)]
    start = data.draw(st.integers(0, len(known)))
    stop = data.draw(st.integers(start, len(known)))
    assert sequence.known_ids(start, stop).tolist() == known[start:stop]


def test_a_sequence_that_goes_on_computes_what_was_published_and_counts_it() -> None:
    sequence = new_sequence(3, 5, output_len=2)
    assert sequence.known_len == 5 and sequence.prefilling and not sequence.exhausted
    sequence.num_computed, sequence.num_planned = 5, 3
    sequence.accept(9)
    assert sequence.output_ids.tolist() == [0, 0, 9, 0, 0]
    assert sequence.output_len == 3 and not sequence.finish


@pytest.mark.parametrize(
    "token, reason",
    [(EOS, FinishReason.EOS), (STOP, FinishReason.STOP_TOKEN), (9, FinishReason.LENGTH)],
)
def test_the_last_token_ends_it_by_what_it_is_before_by_length(token: int, reason: FinishReason) -> None:
    sequence = new_sequence(max_tokens=2)
    sequence.accept(9)
    assert sequence.finish is FinishReason.NONE
    sequence.accept(token)
    assert sequence.finish is reason and sequence.output_len == 2


def test_the_last_token_is_never_computed() -> None:
    assert new_sequence(3, 5).kv_need == 7


@pytest.mark.parametrize("min_tokens", [0, 1, 3])
def test_ends_are_banned_for_the_first_min_tokens(min_tokens: int) -> None:
    sequence = new_sequence(min_tokens=min_tokens)
    banned = []
    for sequence.output_len in range(5):  # known before the draw
        banned.append(sequence.banned_token_ids == {EOS, STOP})
        assert banned[-1] or not sequence.banned_token_ids
    assert banned == [number <= min_tokens for number in range(1, 6)]


def test_ends_stay_banned_when_another_worker_goes_on() -> None:
    sequence = new_sequence(min_tokens=4, output_len=3)
    assert sequence.banned_token_ids
    sequence.output_len += 1
    assert not sequence.banned_token_ids


def test_a_paused_sequence_begins_again_from_what_it_has_published() -> None:
    sequence = new_sequence(3, 5, min_tokens=4)
    sequence.row, sequence.num_computed, sequence.num_planned, sequence.pausing = 2, 4, 2, True
    for token in (20, 21):
        sequence.accept(token)
    sequence.rewind()
    assert (sequence.row, sequence.num_computed, sequence.num_lost, sequence.pausing) == (-1, 0, 4, False)
    assert sequence.known_len == 5 and sequence.known_ids(0, 5).tolist() == [100, 101, 102, 20, 21]
    assert sequence.num_planned == 2 and sequence.prefilling and not sequence.prompt_computed
    assert sequence.kv_need == 7


@pytest.fixture
def slots():
    arena = new_arena()
    fields = {
        "generation": 9, "seed": (1 << 64) - 2, "temperature": 0.5, "top_p": 0.25, "top_k": 40, "max_tokens": 4,
        "min_tokens": 2, "ignore_eos": 1, "params_offset": 0, "params_bytes": 25, "prompt_offset": 64, "prompt_len": 3,
        "output_offset": 128,
    }  # fmt: skip
    blob = json.dumps({"stop_token_ids": [7, 8]}).encode()
    arena.slots.write(1, fields | {"params_bytes": len(blob)})
    arena.slots.write_params(1, blob)
    arena.slots.prompt_ids(1)[:] = [11, 12, 13]
    yield arena.slots
    close(arena)


def test_it_is_read_from_its_slot(slots) -> None:
    sequence = Sequence.from_slot(slots, 1, 0, frozenset({EOS}))
    assert sequence.prompt_ids.tolist() == [11, 12, 13] and len(sequence.output_ids) == 4
    assert (sequence.seed, sequence.temperature, sequence.top_p, sequence.top_k) == ((1 << 64) - 2, 0.5, 0.25, 40)
    assert (sequence.max_tokens, sequence.min_tokens, sequence.output_len) == (4, 2, 0)
    assert sequence.eos_token_ids == frozenset() and sequence.stop_token_ids == {7, 8}


def test_what_an_earlier_worker_published_is_its_beginning(slots) -> None:
    slots.output_ids(1)[:3] = [21, 22, 23]
    slots.publish(1, 9, 2, FinishReason.NONE, released=False)  # the third was written and never published
    sequence = Sequence.from_slot(slots, 1, 2, frozenset())
    assert sequence.output_len == sequence.num_planned == 2 and sequence.known_len == 5
    assert sequence.known_ids(0, 5).tolist() == [11, 12, 13, 21, 22]
    sequence.accept(24)
    assert slots.output_ids(1).tolist()[:3] == [21, 22, 24]


def test_a_rank_that_may_be_a_step_behind_keeps_a_copy_and_writes_nothing(slots) -> None:
    """Rank 0 has given the slot back, and another request stands in it."""
    slots.output_ids(1)[:1] = [21]
    slots.publish(1, 9, 1, FinishReason.NONE, released=False)
    sequence = Sequence.from_slot(slots, 1, 1, frozenset(), keeps_slot=False)
    slots.prompt_ids(1)[:] = [1, 1, 1]
    slots.output_ids(1)[:] = [2, 2, 2, 2]
    sequence.accept(24)
    assert sequence.known_ids(0, 5).tolist() == [11, 12, 13, 21, 24]
    assert slots.output_ids(1).tolist() == [2, 2, 2, 2]


class Letters:
    """In the place of a grammar that has been followed to its end after so many tokens."""

    is_stuck = is_too_slow = False

    def __init__(self, count: int) -> None:
        self.left = count

    def accept(self, token_id: int) -> bool:
        self.left -= 1
        return True

    @property
    def is_over(self) -> bool:
        return self.left == 0


def test_what_a_grammar_ends_is_told_at_once_and_ends_when_all_ranks_know() -> None:
    """Until then it goes on for nobody, as it does on the ranks that follow no grammar."""
    sequence = new_sequence(2, 5, grammar_state=Letters(2))
    follower = new_sequence(2, 5)
    for token_id in (20, 21, 22):
        sequence.accept(token_id)
        follower.accept(token_id)
    assert (sequence.told_finish, sequence.told_len) == (FinishReason.GRAMMAR, 2)
    assert (sequence.finish, sequence.output_len) == (follower.finish, follower.output_len) == (FinishReason.NONE, 3)
    sequence.accept(EOS)
    assert sequence.finish is FinishReason.EOS and sequence.told_finish is FinishReason.GRAMMAR


def test_a_grammar_that_ends_with_the_last_token_has_matched() -> None:
    sequence = new_sequence(2, 2, grammar_state=Letters(2))
    sequence.accept(20)
    sequence.accept(21)
    assert sequence.finish is FinishReason.LENGTH and sequence.told_finish is FinishReason.GRAMMAR
