"""Several sequences from one prompt, through the real router and a real worker: the prompt is computed once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from backend_lib.router.intake import Inbound
from backend_lib.router.reply import ErrorKind
from tests.support.checkpoints import FIRST_CHARACTER, hash_text
from tests.support.engine import assert_level, expected_ids, random_prompt, running_router
from tests.support.senders import ListSender

TOKENS = 12


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hash")


def ask(router, prompt: list[int], **parameters) -> ListSender:
    client = ListSender()
    values = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "exclude_input_in_output": True, **parameters}
    tensors = {"text_input": np.array([hash_text(prompt).encode()], dtype=object)}
    router.submit(Inbound(tensors, values, "", 0, client))
    return client


def expected(prompt: list[int], sequence: int, **how) -> str:
    ids = expected_ids(prompt, TOKENS, sequence=sequence, **how)
    return "".join(chr(FIRST_CHARACTER + token) for token in ids if token != 2)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_each_sequence_draws_its_own_tokens_and_the_prompt_is_computed_once(folder, overlap, rng):
    with running_router(folder, max_running=8, kv_tokens=1024, overlap=overlap, prefill_chunk=16) as router:
        prompt = random_prompt(rng, 40, 40)
        client = ask(router, prompt, n=5, temperature=5.0, seed=77).wait()
        replies, _ = client.sibling_replies[0]
        assert len(client.sibling_replies) == 1
        assert [each.text for each in replies] == [
            expected(prompt, sequence, temperature=5.0, seed=77) for sequence in range(5)
        ]
        assert len({each.text for each in replies}) > 1
        assert [each.num_tokens for each in replies] == [TOKENS] * 5
        assert [each.num_cached_tokens for each in replies] == [0, 39, 39, 39, 39]
        assert_level(router)


def test_streams_of_siblings_join_to_their_texts(folder, rng):
    with running_router(folder, max_running=4, kv_tokens=1024) as router:
        asks = [(random_prompt(rng), ask_n) for ask_n in (1, 2, 3, 4, 3, 2)]
        clients = [ask(router, prompt, n=n, stream=True) for prompt, n in asks]
        for (prompt, n), client in zip(asks, clients, strict=True):
            client.wait()
            if n == 1:
                assert client.text == expected(prompt, 0)
                continue
            for sequence in range(n):
                text = "".join(replies[sequence].text for replies, _ in client.sibling_replies)
                assert text == expected(prompt, sequence)
            assert all(len(replies) == n for replies, _ in client.sibling_replies)
        assert_level(router)


def test_slots_are_granted_to_all_or_none(folder, rng):
    with running_router(folder, max_running=2, queue_size=2, kv_tokens=512) as router:
        refused = ask(router, [5, 6], n=5).wait()
        assert refused.error[0] is ErrorKind.INVALID_ARG and "'n' is 5" in refused.error[1]
        busy = ask(router, [7, 8], max_tokens=150)
        more = ask(router, [9, 10], n=4).wait()
        assert more.error[0] is ErrorKind.UNAVAILABLE and "4 sequences" in more.error[1]
        again = ask(router, [9, 10], n=3).wait()
        assert [each.text for each in again.sibling_replies[0][0]] == [expected([9, 10], s) for s in range(3)]
        busy.wait()
        assert_level(router)


def test_a_client_that_goes_ends_all_of_its_sequences(folder, rng):
    with running_router(folder, max_running=4, kv_tokens=1024) as router:
        client = ask(router, random_prompt(rng), n=4, stream=True, max_tokens=200)
        client.cancelled = True
        assert client.wait().error[0] is ErrorKind.CANCELLED
        assert_level(router)


def test_a_request_may_keep_out_of_the_prefix_cache(folder, rng):
    with running_router(folder, max_running=4, kv_tokens=1024) as router:
        prompt = random_prompt(rng, 30, 30)
        private = ask(router, prompt, disable_prompt_cache=True).wait()
        first = ask(router, prompt).wait()
        second = ask(router, prompt).wait()
        third = ask(router, prompt, disable_prompt_cache=True).wait()
        assert [each.replies[-1].num_cached_tokens for each in (private, first, second, third)] == [0, 0, 29, 0]
        assert {each.text for each in (private, first, second, third)} == {expected(prompt, 0)}


def test_a_higher_priority_goes_first(folder, rng):
    order: list[str] = []

    def note(name: str) -> ListSender:
        return ListSender(lambda reply: order.append(name))

    with running_router(folder, max_running=1, queue_size=64, kv_tokens=512) as router:
        clients = []
        for number in range(24):
            client = note("high" if number >= 20 else "low")
            tensors = {"text_input": np.array([hash_text([5, 6]).encode()], dtype=object)}
            values = {"max_tokens": 30, "ignore_eos": True, "request_priority": 1 if number >= 20 else 0}
            router.submit(Inbound(tensors, values, "", 0, client))
            clients.append(client)
        for client in clients:
            client.wait()
    assert order.index("high") < 16  # not behind the twenty that came first: only behind those given to the worker
    assert order[-1] == "low"
