"""Clients of every kind while the worker is killed, stopped and starved: each request ends rightly, nothing stays."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import pytest

from tests.support.chaos import KINDS, MixedLoad
from tests.support.checkpoints import make_hash_checkpoint
from tests.support.disturbance import HUNG, Disturber
from tests.support.engine import EOS, VOCAB
from tests.support.levels import assert_level, assert_slots_free, wait_idle
from tests.support.metrics import wait_metrics
from tests.support.server import RunningServer, running_server

CONTEXT = 1024
ROWS, QUEUE = 8, 64
# Less KV than the rows want, so that sequences are paused too.
SETTINGS = {
    "max_running": ROWS, "queue_size": QUEUE, "kv_tokens": 2000, "prefill_chunk": 64, "threads": 1, "hang_seconds": 6,
}  # fmt: skip
SEED = 3
ENDLESS = {"max_tokens": CONTEXT - 10, "ignore_eos": True, "temperature": 0}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def server(tmp_path) -> Iterator[RunningServer]:
    folder = make_hash_checkpoint(tmp_path / "hash", vocab_size=VOCAB, eos_token_id=EOS, max_position=CONTEXT)
    with running_server(model=folder, settings=SETTINGS, extra_flags=["--exit-timeout-secs=3"]) as running:
        yield running
        print(*(line for line in running.log.splitlines() if "worker" in line), sep="\n")  # shown beside a failure


def load(server: RunningServer, seed: int, seconds: float) -> MixedLoad:
    mixed = MixedLoad(server, seed)
    time.sleep(seconds)
    mixed.end()
    return mixed


def disturbed_load(server: RunningServer, seed: int, rounds: int, **how) -> tuple[MixedLoad, Disturber]:
    """So many times each kind of disturbance, or until a request ends wrongly."""
    with contextlib.ExitStack() as ends:
        mixed = MixedLoad(server, seed)
        ends.callback(mixed.end)
        disturber = Disturber(server, seed, **how)
        ends.callback(disturber.end)
        while disturber.rounds < rounds and not (disturber.failure or mixed.faults):
            time.sleep(0.05)
    return mixed, disturber


def assert_restarts(server: RunningServer, replaced: int) -> None:
    """No worker has ended but by what was done to it."""
    wait_metrics(server.metrics_url, lambda scrape: scrape.get("tandem_worker_restarts_total") == replaced)


def test_chaos(server) -> None:
    load(server, SEED, 1.5)
    before = wait_idle(server)
    mixed, disturber = disturbed_load(server, SEED + 1, rounds=1, pause=(0.1, 0.5), life=(0.3, 1.0))
    load(server, SEED + 2, 1)  # after the last of it all is as ever
    wait_idle(server)
    assert_level(server, before)
    assert_restarts(server, disturber.replaced)
    assert_slots_free(server, ROWS + QUEUE, ENDLESS)
    print(dict(mixed.asked), dict(disturber.done))
    assert mixed.asked.total() > 20
    assert {"killed", "hung", "stopped", "starved"} <= set(disturber.done)
    assert len(HUNG.findall(server.log)) == disturber.done["hung"]


@pytest.mark.long
def test_chaos_for_minutes(server) -> None:
    """As above; whatever grows by a little each time would have grown by much."""
    seed = random.randrange(1_000_000)
    print(f"seed {seed}")
    _, first = disturbed_load(server, seed, rounds=1)
    before, replaced = wait_idle(server), first.replaced
    for number in range(3):
        mixed, disturber = disturbed_load(server, seed + 1 + number, rounds=4)
        wait_idle(server)
        level = assert_level(server, before)
        replaced += disturber.replaced
        assert_restarts(server, replaced)
        print(number, dict(mixed.asked), dict(disturber.done), level)
        assert set(mixed.asked) == set(KINDS)
    assert_slots_free(server, ROWS + QUEUE, ENDLESS)
