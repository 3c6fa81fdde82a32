"""Several ranks that hold one copy of the weights: real processes, real collectives, the hash model."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from backend_lib.arena.status import LOST_GROUP
from backend_lib.request import FinishReason
from tests.support.checkpoints import hash_text, make_hash_checkpoint
from tests.support.engine import VOCAB, expected_ids
from tests.support.played import PlayedGroup, played_group
from tests.support.processes import wait_ended
from tests.support.random_load import MAX_LEN, MAX_TOKENS, RandomLoad

MEANS = ("arena", "broadcast")
# A KV cache that fewer than half of the rows fill, so that sequences pause.
SMALL = {"num_slots": 40, "max_len": MAX_LEN, "max_tokens": MAX_TOKENS, "max_running": 16, "kv_tokens": 300}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hash")
    make_hash_checkpoint(folder, vocab_size=VOCAB, eos_token_id=2, max_position=256)
    return folder


@pytest.mark.parametrize("agreement", MEANS)
def test_ranks_hold_the_same_state_over_random_commands(checkpoint, agreement):
    with played_group(checkpoint, tensor_parallel=2, agreement=agreement, debug="on", **SMALL) as group:
        load = RandomLoad(group, seed=1)
        load.run(1500)
        status = group.arena.status(0, 0).load
        assert load.num_aborted > 50 and load.num_whole > 500 and status.pauses > 20


@pytest.mark.long
@pytest.mark.parametrize(("agreement", "overlap"), [("arena", "off"), ("broadcast", "off"), ("arena", "on")])
def test_four_ranks_hold_the_same_state_over_many_random_commands(checkpoint, agreement, overlap):
    """Each rank ends itself, and so the test, at the first difference."""
    how = {"tensor_parallel": 4, "agreement": agreement, "debug": "on", "overlap": overlap}
    with played_group(checkpoint, **how, **SMALL) as group:
        load = RandomLoad(group, seed=2)
        load.run(100_000)
        status = group.arena.status(0, 0).load
        print(f"{agreement}, overlap {overlap}: {load.num_whole} whole, {load.num_aborted} aborted, {status}")
        assert load.num_aborted > 1000 and status.pauses > 1000


@pytest.mark.parametrize("agreement", MEANS)
def test_what_a_grammar_ends_is_ended_on_every_rank(checkpoint, agreement):
    """Rank 0 alone follows grammars. One that ends beside others, and one that cannot be compiled."""
    choice = {
        "grammar": {"kind": "choice", "source": json.dumps([hash_text([9, 10, 11]), hash_text([20, 21, 22, 23, 24])])}
    }
    broken = {"grammar": {"kind": "ebnf", "source": "root ::= missing"}}
    with played_group(checkpoint, tensor_parallel=2, agreement=agreement, debug="on", **SMALL) as group:
        others = [group.admit(slot, [5, slot], MAX_TOKENS) for slot in range(8)]
        matched = [group.admit(slot, [7, slot], MAX_TOKENS, params=choice) for slot in range(8, 16)]
        refused = group.admit(16, [9], 4, params=broken)
        group.wait_released([*others, *matched, refused])
        more = [group.admit(slot, [6, slot], MAX_TOKENS) for slot in range(17, 25)]  # the ranks still agree
        group.wait_released(more)
        assert {group.published(ref).finish for ref in matched} == {FinishReason.GRAMMAR}
        assert group.published(refused).finish is FinishReason.INVALID
        assert all(group.output(ref) == list(expected_ids([5, ref.slot], MAX_TOKENS)) for ref in others)
        assert all(group.output(ref) == list(expected_ids([6, ref.slot], MAX_TOKENS)) for ref in more)


def test_a_difference_between_ranks_ends_the_rank_that_finds_it(checkpoint, monkeypatch):
    """Rank 1 is made to hold another state: it takes one more KV index than rank 0."""
    monkeypatch.setenv("TANDEM_CRASH_POINTS", "")
    group = PlayedGroup(str(checkpoint), tensor_parallel=2, debug="on", **SMALL)
    try:
        group.start(modules={1: "tests.support.disturbed_rank"})
        group.admit(0, [5, 6], MAX_TOKENS)
        assert not wait_ended(group.psutil_processes[1:], 20)
        assert "rank 1 and rank 0 differ after step" in group.arena.status(0, 1).error
        assert group.arena.status(0, 1).error.endswith("in kv")
    finally:
        group.close()


def test_a_rank_whose_group_is_lost_says_so(checkpoint):
    with played_group(checkpoint, tensor_parallel=2, **SMALL) as group:
        group.admit(0, [5, 6], MAX_TOKENS)
        os.kill(group.processes[1].pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while group.processes[0].poll() is None and time.monotonic() < deadline:
            group.admit(1 + group.ring.head % 30, [5, 7], MAX_TOKENS)
            time.sleep(0.05)
        assert group.processes[0].poll() == LOST_GROUP
        assert "has lost another rank" in group.arena.status(0, 0).error


def test_a_rank_that_reads_a_slot_late_begins_where_the_others_began(checkpoint):
    """The model needs no collective, and ids go from rank to rank: rank 0 publishes before the last one has read."""
    group = PlayedGroup(str(checkpoint), tensor_parallel=4, debug="on", **SMALL)
    try:
        group.start(modules={3: "tests.support.slow_rank"})
        refs = [group.admit(slot, [5, slot], MAX_TOKENS) for slot in range(12)]
        group.wait_released(refs)
        more = [group.admit(slot, [6, slot], MAX_TOKENS) for slot in range(12, 24)]
        group.wait_released(more)
        assert all(group.output(ref) == list(expected_ids([5, ref.slot], MAX_TOKENS)) for ref in refs)
        group.assert_alive()
    finally:
        group.close()
