"""Router and worker process with too little KV memory: pauses, shared prefixes, and every token right."""

from __future__ import annotations

import random

import pytest

from backend_lib.router.reply import ErrorKind
from backend_lib.router.router import Router
from tests.support.engine import Ask, assert_level, random_prompt, running_router
from tests.support.senders import ListSender

KV_TOKENS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hash")


def begin_history(router: Router, rng: random.Random) -> None:
    """Short answers to requests that allowed long ones, so that the worker expects short ones from now on."""
    asks = [Ask(random_prompt(rng, 1, 5), {"max_tokens": 3, "ignore_eos": True}) for _ in range(200)]
    for ask in asks:
        router.submit(ask.inbound())
    for ask in asks:
        ask.check()


def shared_asks(rng: random.Random, count: int) -> list[tuple[bool, Ask]]:
    """Whether its client calls it off, and the request; prompts begin like one of three."""
    beginnings = [random_prompt(rng, 30, 50) for _ in range(3)]
    asks = []
    for _ in range(count):
        prompt = rng.choice(beginnings)[: rng.randint(10, 50)] + random_prompt(rng, 1, 10)
        parameters = {"max_tokens": rng.choice([1, 20, 100, 150]), "ignore_eos": rng.random() < 0.5}
        ask, cancelled = Ask(prompt, parameters), rng.random() < 0.1
        if rng.random() < 0.2:
            parameters |= {"temperature": 2.0, "seed": rng.getrandbits(64)}
        if cancelled:
            parameters["stream"] = True
            ask.sender = ListSender(lambda reply, ask=ask: setattr(ask.sender, "cancelled", True))
        asks.append((cancelled, ask))
    return asks


def check(cancelled: bool, ask: Ask) -> None:
    if cancelled and ask.sender.wait().error is not None:
        ask.check_prefix(ErrorKind.CANCELLED)
    else:
        ask.check()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_every_token_is_right_through_pauses_and_shared_prefixes(folder, overlap: str) -> None:
    rng = random.Random(len(overlap))
    settings = {"max_running": 8, "kv_tokens": KV_TOKENS, "prefill_chunk": 32, "queue_size": 1000}
    with running_router(folder, overlap=overlap, **settings) as router:
        begin_history(router, rng)
        asks = shared_asks(rng, 120)
        for _, ask in asks:
            router.submit(ask.inbound())
        for cancelled, ask in asks:
            check(cancelled, ask)
        assert_level(router)
        load = router._arena.status(0, 0).load
        assert (load.running, load.waiting, load.paused, load.kv_used) == (0, 0, 0, 0)
        assert 0 < load.cached <= KV_TOKENS
        assert load.pauses > 10 and load.recomputed > 0, load


def test_a_prompt_in_the_cache_gives_the_same_answer_at_once(folder) -> None:
    with running_router(folder, kv_tokens=1000, prefill_chunk=4) as router:
        steps = []
        for _ in range(2):
            before = router._arena.status(0, 0).load.step
            ask = Ask([5] * 200, {"max_tokens": 2, "ignore_eos": True})
            router.submit(ask.inbound())
            ask.check()
            assert_level(router)
            steps.append(router._arena.status(0, 0).load.step - before)
        assert steps[0] >= 200 / 4 and steps[1] < 10
        assert router._arena.status(0, 0).load.cached == 201
