"""Two ranks behind a real router give the answers of one worker, also when one of them dies."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.engine.test_worker_kernels import answers, asks, check
from tests.support.checkpoints import make_tiny_llama
from tests.support.engine import Ask, assert_level, pids_of, random_prompt, running_router, wait_until

RANKS = {"tensor_parallel": 2, "debug": "on"}
FP32 = {"device": "cpu", "weights": "fp32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list:
    asked = asks()
    with running_router(folder, **FP32) as router:
        for ask in asked:
            router.submit(ask.inbound())
        return answers(asked)


@pytest.mark.parametrize(
    "how",
    [
        FP32 | {"kv_tokens": 90, "max_running": 6, "prefill_chunk": 7},
        pytest.param(FP32 | {"agreement": "broadcast", "overlap": "on"}, marks=pytest.mark.long),
        pytest.param({"device": "interpret", "dtype": "float32"}, marks=pytest.mark.long),
    ],
    ids=["short of memory", "broadcast, overlap", "kernels"],
)
def test_two_ranks_give_the_tokens_and_log_probabilities_of_one(folder, expected, how):
    """Draws, penalties, filters, log-probabilities of output and prompt."""
    asked = asks()
    with running_router(folder, **RANKS, **how) as router:
        for ask in asked:
            router.submit(ask.inbound())
        check(asked, expected)
        assert_level(router)


def test_streams_go_on_when_either_rank_dies(tmp_path, caplog, capfd):
    """And the log says which rank it was, and of which rank a worker's own lines are."""
    rng, killed = random.Random(5), []
    with running_router(tmp_path / "hash", **RANKS, max_running=8) as router:
        for rank in (1, 0):
            asked = [
                Ask(random_prompt(rng), {"max_tokens": 150, "ignore_eos": True, "stream": True}) for _ in range(12)
            ]
            for ask in asked:
                router.submit(ask.inbound())
            wait_until(lambda asked=asked: sum(ask.sender.num_tokens > 2 for ask in asked) >= 8)
            epoch = router._arena.epoch(0)
            pids = pids_of(router, f"--rank={rank}")
            os.kill(*pids, signal.SIGKILL)
            for ask in asked:
                ask.check()
            assert router._arena.epoch(0) == epoch + 1
            assert f"worker {pids[0]}, rank {rank} was killed by SIGKILL; starting the group again" in caplog.messages
            killed.append(f"tandem worker {pids[0]}, rank {rank}: loaded ")
        assert_level(router)
    said = capfd.readouterr().err
    assert all(words in said for words in killed)
