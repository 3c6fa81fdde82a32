"""How ranks meet: real processes, the hash model."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.support.checkpoints import make_hash_checkpoint
from tests.support.engine import VOCAB, expected_ids
from tests.support.played import PlayedGroup, played_group

SIZES = {"num_slots": 8, "max_len": 32, "max_tokens": 16, "max_running": 8, "kv_tokens": 300}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hash")
    make_hash_checkpoint(folder, vocab_size=VOCAB, eos_token_id=2, max_position=256)
    return folder


def test_a_rank_that_waits_for_rank_0_does_nothing(checkpoint):
    """Who watches ranks that load takes processor time for progress: one that hangs must not look busy by others."""
    group = PlayedGroup(str(checkpoint), tensor_parallel=2, **SIZES)
    try:
        process = psutil.Process(group.start_one(1).pid)
        deadline = time.monotonic() + 30
        while not any("libtorch_cpu" in each.path for each in process.memory_maps()):
            assert time.monotonic() < deadline
        while wake_ups(process, 1.5) > 5:
            assert time.monotonic() < deadline
        group.start_one(0)
        ref = group.admit(0, [5, 6], 8)
        group.wait_released([ref])
        assert group.output(ref) == list(expected_ids([5, 6], 8))
    finally:
        group.close()


def wake_ups(process: psutil.Process, seconds: float) -> int:
    before = process.num_ctx_switches().voluntary
    time.sleep(seconds)
    return process.num_ctx_switches().voluntary - before


def test_ranks_meet_on_the_loopback_whatever_the_environment_says_of_networks(checkpoint, monkeypatch):
    """What other programs are told there is of no use to ranks of one machine."""
    elsewhere = {
        "GLOO_SOCKET_IFNAME": "nonsense0", "NCCL_SOCKET_IFNAME": "nonsense0", "GLOO_DEVICE_TRANSPORT": "TLS_TCP",
        "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1", "WORLD_SIZE": "7", "RANK": "5",
    }  # fmt: skip
    for name, value in elsewhere.items():
        monkeypatch.setenv(name, value)
    with played_group(checkpoint, tensor_parallel=2, **SIZES) as group:
        ref = group.admit(0, [5, 6], 8)
        group.wait_released([ref])
        assert group.output(ref) == list(expected_ids([5, 6], 8))
