"""Clients of every kind while the worker is killed, stopped and starved: each request ends rightly, nothing stays."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch

from tests.support.chaos import KINDS, MixedLoad
from tests.support.checkpoints import make_hash_checkpoint
from tests.support.disturbance import Disturber
from tests.support.engine import EOS, VOCAB
from tests.support.levels import assert_level, assert_slots_free, wait_idle
from tests.support.metrics import Scrape
from tests.support.server import RunningServer, running_server

CONTEXT = 1024
ROWS, QUEUE = 8, 40
# Less KV than the rows want, so that sequences are paused too.
SETTINGS = {"max_running": ROWS, "queue_size": QUEUE, "kv_tokens": 2000, "prefill_chunk": 64, "threads": 1}
SEED = 3
ENDLESS = {"max_tokens": CONTEXT - 10, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def server(tmp_path) -> Iterator[RunningServer]:
    folder = make_hash_checkpoint(tmp_path / "hash", vocab_size=VOCAB, eos_token_id=EOS, max_position=CONTEXT)
    with running_server(model=folder, settings=SETTINGS, extra_flags=["--exit-timeout-secs=3"]) as running:
        yield running


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What is expected of a draw is worked out with torch, beside a server that wants the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(server: RunningServer, seed: int, seconds: float) -> MixedLoad:
    mixed = MixedLoad(server, seed)
    time.sleep(seconds)
    mixed.end()
    return mixed


def disturbed_load(server: RunningServer, seed: int, seconds: float, **how) -> tuple[MixedLoad, Disturber]:
    disturber = Disturber(server, seed, **how)
    try:
        mixed = load(server, seed, seconds)
    finally:
        disturber.end()
    return mixed, disturber


def test_chaos(server) -> None:
    load(server, SEED, 2)
    before = wait_idle(server)
    mixed, disturber = disturbed_load(server, SEED + 1, 10)
    load(server, SEED + 2, 1)  # after the last of it all is as ever
    wait_idle(server)
    assert_level(server, before)
    assert_slots_free(server, ROWS + QUEUE, ENDLESS)
    print(dict(mixed.asked), dict(disturber.done))
    assert mixed.asked.total() > 50
    assert disturber.done["kills"] >= 1 and disturber.done.total() >= 4
    restarts = Scrape.of(server.metrics_url).get("tandem_worker_restarts_total")
    assert restarts == disturber.done["kills"] + disturber.done["kills of a loading worker"]


@pytest.mark.long
def test_chaos_for_minutes(server) -> None:
    """As above; whatever grows by a little each time would have grown by much."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    disturbed_load(server, seed, 20)
    before = wait_idle(server)
    for minute in range(3):
        mixed, disturber = disturbed_load(server, seed + 1 + minute, 60)
        wait_idle(server)
        level = assert_level(server, before)
        print(minute, dict(mixed.asked), dict(disturber.done), level)
        assert set(mixed.asked) == set(KINDS)
    assert_slots_free(server, ROWS + QUEUE, ENDLESS)
