"""Two groups of workers when one of them dies, or cannot come back. The hash model makes every continuation exact."""

from __future__ import annotations

import os
import random
import signal

import pytest

from backend_lib.config import Settings
from backend_lib.router import router as router_module
from backend_lib.router import supervisor
from backend_lib.router.reply import ErrorKind
from backend_lib.router.router import Router
from tests.support.checkpoints import make_config_folder, make_hash_checkpoint
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
    worker_pids,
)

SETTINGS = {"data_parallel": 2, "max_running": 4, "kv_tokens": 6000, "prefill_chunk": 64}


@pytest.fixture
def folder(tmp_path):
    return make_hash_checkpoint(tmp_path / "hash", vocab_size=VOCAB, eos_token_id=EOS, max_position=4096)


def streams(rng: random.Random, count: int, **fields) -> list[Ask]:
    return [
        Ask(random_prompt(rng), {"max_tokens": 600, "ignore_eos": True, "stream": number % 3 > 0} | fields)
        for number in range(count)
    ]


def test_what_a_group_had_goes_on_elsewhere_when_its_workers_cannot_start(folder, monkeypatch, caplog) -> None:
    """Only those that named the group end, and the model is ready all the time. The log says when it is tried again."""
    monkeypatch.setattr(supervisor, "BACK_OFF", (0.0, 0.2))
    monkeypatch.setattr(router_module, "MAX_FAILED_STARTS", 2)
    rng = random.Random(1)
    # Long ones, which have not ended before the worker does, however late the other group begins.
    asks, named = streams(rng, 16), streams(rng, 2, dp_rank=0, max_tokens=2400)
    with running_router(folder, **SETTINGS) as router:
        for ask in [*named, *asks]:
            router.submit(ask.inbound())
        wait_until(lambda: all(ask.sender.num_tokens >= 10 for ask in [named[1], asks[1], asks[2]]))
        (folder / "config.json").rename(folder / "hidden")
        os.kill(worker_pid(router, 0), signal.SIGKILL)
        for ask in asks:
            ask.check()
        for ask in named:
            ask.check_prefix(ErrorKind.UNAVAILABLE)
            assert "the model cannot be loaded: worker" in ask.sender.error[1]
        downs = [words for words in caplog.messages if "; starting another" in words]
        assert downs[0].endswith("of group 0 was killed by SIGKILL; starting another")
        assert downs[1].endswith("; starting another in 0.2 s") and "has no config.json" in downs[1]
        assert router.is_ready() and router._arena.epoch(0) >= 2 and router._arena.epoch(1) == 0
        assert not router._groups.all[0].is_up
        (folder / "hidden").rename(folder / "config.json")
        wait_until(lambda: router._groups.all[0].is_up)
        (late,) = streams(rng, 1, dp_rank=0)
        router.submit(late.inbound())
        late.check()
        assert_level(router)


def test_a_worker_that_cannot_be_loaded_fails_the_load_of_all(tmp_path) -> None:
    before = worker_pids()
    broken = make_config_folder(tmp_path / "llama")
    (broken / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(
        RuntimeError, match=r"worker \d+ of group \d ended with status 1: ValueError: .*not a whole safe"
    ):
        Router(Settings(model=str(broken), threads=1, data_parallel=2))
    assert worker_pids() == before


@pytest.mark.long
def test_a_group_that_hangs_is_replaced_and_the_other_goes_on(folder, caplog) -> None:
    rng = random.Random(2)
    with running_router(folder, hang_seconds=1, **SETTINGS) as router:
        asks = [streams(rng, 3, dp_rank=group) for group in range(2)]
        for ask in [*asks[0], *asks[1]]:
            router.submit(ask.inbound())
        wait_until(lambda: asks[1][1].sender.num_tokens > 10)
        os.kill(stopped := worker_pid(router, 1), signal.SIGSTOP)
        for ask in [*asks[0], *asks[1]]:
            ask.check()
        assert (router._arena.epoch(0), router._arena.epoch(1)) == (0, 1)
        assert f"worker {stopped} of group 1 made no progress for 1." in caplog.text
        assert_level(router)


@pytest.mark.long
def test_a_request_that_kills_workers_does_so_in_one_group(tmp_path) -> None:
    """Also when it has not named it: suspects stay. The router is made to admit a prompt that leaves the KV table."""
    rng = random.Random(3)
    others = [Ask(random_prompt(rng), {"max_tokens": 200, "ignore_eos": True}) for _ in range(12)]
    poison = Ask([7] * 300, {"max_tokens": 1})
    with running_router(tmp_path / "hash", **SETTINGS | {"prefill_chunk": 16, "kv_tokens": 2000}) as router:
        router._intake.max_len = 1000
        for ask in [*others[:6], poison, *others[6:]]:
            router.submit(ask.inbound())
        kind, words = poison.sender.wait(60).error
        assert kind is ErrorKind.INTERNAL and words.startswith("the worker died 3 times while it computed this request")
        assert sorted([router._arena.epoch(0), router._arena.epoch(1)]) == [0, 3]
        for ask in others:
            ask.check()
        assert_level(router)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_deaths_of_any_worker_at_any_time(folder, ranks: int) -> None:
    rng = random.Random(ranks)
    with running_router(folder, tensor_parallel=ranks, **SETTINGS) as router:
        for _ in range(12):
            asks = streams(rng, 20, **({"dp_rank": rng.randrange(2)} if rng.random() < 0.3 else {}))
            for ask in asks:
                router.submit(ask.inbound())
            wait_until(lambda asks=asks: sum(ask.sender.num_tokens for ask in asks) > rng.randrange(2000))
            for pid in rng.sample(pids := pids_of(router), min(len(pids), rng.randint(1, 2))):
                os.kill(pid, signal.SIGKILL)
            for ask in asks:
                ask.check(60)
        assert_level(router)
