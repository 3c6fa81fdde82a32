"""A worker that stops without ending is replaced; one that is only slow is left alone."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from backend_lib.router.reply import ErrorKind
from tests.support.checkpoints import make_hash_checkpoint
from tests.support.engine import (
    EOS,
    VOCAB,
    Ask,
    assert_level,
    pids_of,
    random_prompt,
    running_router,
    wait_until,
    worker_pid,
)

SETTINGS = {"max_running": 4, "kv_tokens": 4000, "hang_seconds": 1}


@pytest.fixture
def folder(tmp_path):
    return make_hash_checkpoint(tmp_path / "hash", vocab_size=VOCAB, eos_token_id=EOS, max_position=1024)


def endless(rng: random.Random, count: int) -> list[Ask]:
    return [
        Ask(random_prompt(rng), {"max_tokens": 800, "ignore_eos": True, "stream": number % 2 == 0})
        for number in range(count)
    ]


def test_a_worker_that_hangs_under_load_is_replaced_and_streams_go_on(folder) -> None:
    asks = endless(random.Random(1), 6)
    with running_router(folder, **SETTINGS) as router:
        for ask in asks:
            router.submit(ask.inbound())
        wait_until(lambda: asks[0].sender.num_tokens > 10)
        stopped = worker_pid(router)
        os.kill(stopped, signal.SIGSTOP)
        for ask in asks:
            ask.check()
        assert router._arena.epoch(0) == 1 and worker_pid(router) != stopped
        assert_level(router)


def test_a_worker_that_hangs_while_idle_is_replaced_once_it_has_commands_to_read(folder) -> None:
    with running_router(folder, **SETTINGS) as router:
        stopped = worker_pid(router)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(2)
        assert worker_pid(router) == stopped  # it owes nothing
        ask = Ask([5, 6], {"max_tokens": 20})
        router.submit(ask.inbound())
        ask.check()
        assert router._arena.epoch(0) == 1 and worker_pid(router) != stopped
        assert_level(router)


def test_a_worker_that_stops_while_it_loads_is_replaced(folder) -> None:
    ask = Ask([5, 6], {"max_tokens": 20})
    with running_router(folder, **SETTINGS) as router:
        first = worker_pid(router)
        os.kill(first, signal.SIGKILL)
        router.submit(ask.inbound())
        wait_until(lambda: worker_pid(router) not in (None, first))
        os.kill(stopped := worker_pid(router), signal.SIGSTOP)
        ask.check()
        assert worker_pid(router) != stopped
        assert_level(router)


def test_what_a_full_step_takes_is_told_and_counts(folder) -> None:
    """So that a slow machine is given the time for its steps."""
    with running_router(folder, **SETTINGS) as router:
        assert 0 < router._arena.status(0, 0).predicted_step < 5


def test_a_worker_that_was_stopped_for_less_is_left_alone(folder) -> None:
    asks = endless(random.Random(2), 4)
    with running_router(folder, **SETTINGS | {"hang_seconds": 30}) as router:
        pid = worker_pid(router)
        for ask in asks:
            router.submit(ask.inbound())
        wait_until(lambda: asks[0].sender.num_tokens > 10)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        for ask in asks:
            ask.check()
        assert router._arena.epoch(0) == 0 and worker_pid(router) == pid
        assert_level(router)


@pytest.mark.long
def test_requests_that_take_no_step_are_answered_though_a_rank_does_not_read_commands(folder) -> None:
    """Rank 0 refuses each grammar by itself, and the router has another to post: the ring must not fill up for the
    other rank, which is stopped for longer than the router would wait."""
    asks = [Ask([5, 6, number % 60], {"guided_grammar": f"root ::= missing{number % 3}"}) for number in range(120)]
    with running_router(folder, **SETTINGS | {"hang_seconds": 60, "tensor_parallel": 2}) as router:
        (stopped,) = pids_of(router, "--rank=1")
        os.kill(stopped, signal.SIGSTOP)
        for ask in asks:
            router.submit(ask.inbound())
        time.sleep(8)
        os.kill(stopped, signal.SIGCONT)
        assert {ask.sender.wait(30).error[0] for ask in asks} == {ErrorKind.INVALID_ARG}
        assert router._arena.epoch(0) == 0
        assert_level(router)
