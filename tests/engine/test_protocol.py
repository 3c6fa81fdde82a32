"""Router and worker process together, below Triton, on the hash model: every token of every request is checked."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from backend_lib.arena.ring import RingFull
from backend_lib.config import Settings
from backend_lib.models.hash_model import expected_next
from backend_lib.request import FinishReason
from backend_lib.router.reply import ErrorKind
from backend_lib.router.router import Router
from tests.support.checkpoints import hash_text, make_config_folder
from tests.support.engine import (
    EOS,
    VOCAB,
    Ask,
    assert_level,
    expected_ids,
    random_prompt,
    running_router,
    wait_until,
    worker_pids,
)
from tests.support.senders import ListSender

# So small that requests queue for slots, rows, KV and prefill budget alike.
TIGHT = {"max_running": 6, "kv_tokens": 300, "prefill_chunk": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hash")


@pytest.fixture(scope="module")
def router(folder):
    with running_router(folder, **TIGHT) as router:
        yield router


@pytest.fixture(autouse=True)
def level(request):
    """After each test that used the shared router everything has come back."""
    yield
    if "router" in request.fixturenames:
        assert_level(request.getfixturevalue("router"))


def test_the_reference_is_the_models_own() -> None:
    prompt = random_prompt(random.Random(0))
    ids = list(prompt)
    for token in expected_ids(prompt, 30):
        assert token == expected_next(ids, VOCAB)
        ids.append(token)


class Mix:
    """Random requests of all kinds, and what becomes of each."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def ask(self) -> tuple[str, Ask]:
        kind = self.rng.choices(["plain", "cancelled", "late", "bad"], [80, 8, 6, 6])[0]
        return kind, getattr(self, f"_{kind}")()

    def _plain(self) -> Ask:
        rng = self.rng
        prompt = random_prompt(rng, 1, rng.choice([3, 40, 40, 150]))
        max_tokens = rng.choice([1, 2, 5, 20, 60])
        parameters = {"max_tokens": max_tokens, "stream": rng.random() < 0.5}
        if rng.random() < 0.3:
            parameters["ignore_eos"] = True
        if rng.random() < 0.3:
            parameters["min_tokens"] = rng.randint(0, max_tokens)
        if rng.random() < 0.3:
            parameters["stop_token_ids"] = rng.sample(range(VOCAB), rng.randint(1, 4))
        if rng.random() < 0.3:
            parameters["stop"] = self._stops(prompt, max_tokens)
        if rng.random() < 0.3:
            parameters["stream_interval"] = rng.randint(1, 9)
        if rng.random() < 0.1:
            parameters |= {"temperature": rng.choice([1.0, 4.0]), "seed": rng.getrandbits(64)}
        return Ask(prompt, parameters)

    def _stops(self, prompt: list[int], max_tokens: int) -> list[str]:
        """Some that will come, two tokens long, and some that will not."""
        text = hash_text(list(expected_ids(prompt, max_tokens)))
        at = self.rng.randrange(len(text))
        return [text[at : at + 2], hash_text(random_prompt(self.rng, 2, 3))]

    def _cancelled(self) -> Ask:
        ask = self._plain()
        if self.rng.random() < 0.5:
            ask.sender.cancelled = True
        else:
            ask.parameters["stream"] = True
            ask.sender = ListSender(lambda reply: setattr(ask.sender, "cancelled", True))
        return ask

    def _late(self) -> Ask:
        ask = self._plain()
        ask.timeout_us = self.rng.choice([1, 1000, 50_000, 200_000])
        return ask

    def _bad(self) -> Ask:
        ask = self._plain()
        text, parameters = self.rng.choice(
            [
                ("", {}),
                (None, {"temperature": -1}),
                (None, {"no_such_field": 1}),
                (None, {"stop_token_ids": [VOCAB]}),
                (None, {"max_tokens": 2, "min_tokens": 3}),
                (hash_text([5] * 256), {}),
            ]
        )
        ask.text = text
        ask.parameters |= parameters
        return ask


def check(kind: str, ask: Ask) -> None:
    if kind == "bad":
        error = ask.sender.wait().error
        assert error is not None and error[0] is ErrorKind.INVALID_ARG and not ask.sender.replies
    elif ask.sender.wait().error is None:  # perhaps it was done before it was called off
        ask.check()
    else:
        assert kind != "plain", ask.sender.error
        ask.check_prefix(ErrorKind.CANCELLED if kind == "cancelled" else ErrorKind.UNAVAILABLE)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_thousands_of_requests_of_all_kinds(folder, overlap: str) -> None:
    mix = Mix(seed=len(overlap))
    with running_router(folder, overlap=overlap, queue_size=400, **TIGHT) as router:
        for _ in range(4):
            asks = [mix.ask() for _ in range(400)]
            for _, ask in asks:
                router.submit(ask.inbound())
            for kind, ask in asks:
                check(kind, ask)
            assert_level(router)


def test_streams_that_come_and_go_at_their_own_pace(router) -> None:
    """Submitted from several threads, with pauses, so that the worker idles and wakes in between."""
    done = []

    def client(seed: int) -> None:
        mix = Mix(seed)
        for _ in range(40):
            kind, ask = mix.ask()
            router.submit(ask.inbound())
            check(kind, ask)
            time.sleep(mix.rng.choice([0, 0, 0.003]))
        done.append(seed)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(8))


def test_a_slow_client_gets_what_piled_up_as_one_response(router) -> None:
    slow = Ask([5, 6], {"max_tokens": 100, "ignore_eos": True, "stream": True})
    slow.sender = ListSender(lambda reply: time.sleep(0.02))
    quick = Ask([7], {"max_tokens": 100, "ignore_eos": True, "stream": True})
    router.submit(slow.inbound())
    router.submit(quick.inbound())
    quick.check()
    slow.check()
    assert len(slow.sender.replies) < 50


def test_a_client_that_fails_harms_nobody_else(router) -> None:
    def broken(reply) -> None:
        raise RuntimeError("no such client")

    failing = [
        Ask([5, number], {"max_tokens": 50, "stream": True}, sender=ListSender(broken)) for number in range(5, 9)
    ]
    others = [Ask([6, number], {"max_tokens": 50}) for number in range(5, 9)]
    for pair in zip(failing, others, strict=True):
        for ask in pair:
            router.submit(ask.inbound())
    for ask in others:
        ask.check()
    for ask in failing:
        assert ask.sender.wait().error[0] is ErrorKind.INTERNAL


def test_a_stream_that_is_over_before_its_submit_returns_leaves_nothing(router, monkeypatch) -> None:
    submit, returned = router._groups.all[0].submit, threading.Event()

    def slow_submit(stream) -> None:
        submit(stream)
        while stream.slot in router._streams:
            time.sleep(0.001)
        returned.set()

    monkeypatch.setattr(router._groups.all[0], "submit", slow_submit)
    ask = Ask([5, 6], {"max_tokens": 1})
    router.submit(ask.inbound())
    ask.check()
    assert returned.wait(5)
    time.sleep(0.05)  # for what the intake thread may still do with it


def test_a_request_that_cannot_be_posted_is_answered(router, monkeypatch) -> None:
    def full(*args) -> int:
        raise RingFull("command ring is full")

    ask = Ask([5, 6], {"max_tokens": 1})
    with monkeypatch.context() as context:
        context.setattr(router._groups.all[0].ring, "post", full)
        router.submit(ask.inbound())
        ask.check_prefix(ErrorKind.INTERNAL)
    assert ask.sender.error == (ErrorKind.INTERNAL, "RingFull: command ring is full")
    again = Ask([5, 6], {"max_tokens": 1})
    router.submit(again.inbound())
    again.check()


def test_a_cancelled_request_gives_its_memory_back_soon(router) -> None:
    ask = Ask([5, 6, 7], {"max_tokens": 250, "ignore_eos": True, "stream": True})
    ask.sender = ListSender(lambda reply: setattr(ask.sender, "cancelled", True))
    others = [Ask([8, 9], {"max_tokens": 20, "ignore_eos": True}) for _ in range(4)]
    for each in (ask, *others):
        router.submit(each.inbound())
    started = time.monotonic()
    for each in others:
        each.check()
    assert ask.sender.wait().done.is_set() and time.monotonic() - started < 2


def test_a_full_queue_refuses_at_once_and_harms_nobody(folder) -> None:
    with running_router(folder, max_running=2, queue_size=4, kv_tokens=512) as router:
        asks = [Ask([5, number], {"max_tokens": 200, "ignore_eos": True}) for number in range(10, 16)]
        for ask in asks:
            router.submit(ask.inbound())
        wait_until(lambda: router._arena.status(0, 0).load.running == 2)
        refused = Ask([7], {"max_tokens": 1})
        router.submit(refused.inbound())
        assert refused.sender.done.is_set()  # before submit returned
        kind, words = refused.sender.error
        assert kind is ErrorKind.UNAVAILABLE and "the queue is full: 4 sequences wait and 2 run" in words
        for ask in asks:
            ask.check()
        assert_level(router)
        again = Ask([7], {"max_tokens": 1})
        router.submit(again.inbound())
        again.check()


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "'text_input' is ''"),
        (hash_text([5] * 256), "'text_input' has 256 tokens; allowed are at most 255"),
        (hash_text([5] * 1500), "allowed are at most 255"),
        ("\u4dff", "'text_input' has no tokens"),  # a character that the tokenizer does not know
    ],
)
def test_prompts_that_cannot_be_served_are_refused_in_words(router, text: str, words: str) -> None:
    ask = Ask([], {"max_tokens": 1}, text=text)
    router.submit(ask.inbound())
    kind, message = ask.sender.wait().error
    assert kind is ErrorKind.INVALID_ARG and words in message


def test_what_cannot_fit_is_not_tokenised(router, monkeypatch) -> None:
    monkeypatch.setattr(router._intake._prompts._encoder, "_tokenizer", None)
    ask = Ask([], {"max_tokens": 1}, text="a" * 1_000_000)
    router.submit(ask.inbound())
    kind, message = ask.sender.wait().error
    assert kind is ErrorKind.INVALID_ARG
    assert message == "'text_input' has 1000000 bytes; allowed are at most 5100, which is 255 tokens of 20 bytes"


class SlowTokenizer:
    """Takes its time with a text that is `slow`, and keeps what it was given."""

    def __init__(self, tokenizer, slow: str) -> None:
        self.texts: list[str] = []
        self.may_go_on = threading.Event()
        self._tokenizer = tokenizer
        self._slow = slow

    def encode_batch_fast(self, texts: list[str], **options: Any):
        self.texts += texts
        if texts == [self._slow]:
            self.may_go_on.wait(10)
        return self._tokenizer.encode_batch_fast(texts, **options)


@pytest.fixture
def slow(router, monkeypatch) -> SlowTokenizer:
    tokenizer = SlowTokenizer(router._intake._prompts._encoder._tokenizer, slow=hash_text([9]))
    monkeypatch.setattr(router._intake._prompts._encoder, "_tokenizer", tokenizer)
    return tokenizer


class Panic(BaseException):
    """As a panic in Rust arrives in Python."""


def test_a_panic_in_the_tokenizer_is_that_requests_error(router, monkeypatch) -> None:
    def panic(*args):
        raise Panic("index out of bounds")

    monkeypatch.setattr(router._intake._prompts._encoder, "encode", panic)
    asks = [Ask([5], {"max_tokens": 1}) for _ in range(5)]
    for ask in asks:
        router.submit(ask.inbound())
    for ask in asks:
        ask.check_prefix(ErrorKind.INTERNAL)
        assert ask.sender.error == (ErrorKind.INTERNAL, "Panic: index out of bounds")


def test_a_panic_while_text_is_made_is_that_requests_error(router, monkeypatch) -> None:
    def panic(*args):
        raise Panic("index out of bounds")

    asks = [Ask([5, number], {"max_tokens": 9, "ignore_eos": True}) for number in range(5, 13)]
    with monkeypatch.context() as context:
        context.setattr("backend_lib.router.text.TextStream.push", panic)
        for ask in asks:
            router.submit(ask.inbound())
        for ask in asks:
            ask.check_prefix(ErrorKind.INTERNAL)
    again = Ask([5], {"max_tokens": 1})
    router.submit(again.inbound())
    again.check()


def test_a_request_that_is_over_before_its_intake_is_not_tokenised(router, slow) -> None:
    before = [Ask([9], {"max_tokens": 1}) for _ in range(2)]
    late, gone = Ask([5], {"max_tokens": 1}, timeout_us=50_000), Ask([6], {"max_tokens": 1})
    for ask in (*before, late, gone):
        router.submit(ask.inbound())
    gone.sender.cancelled = True
    time.sleep(0.1)
    slow.may_go_on.set()
    late.check_prefix(ErrorKind.UNAVAILABLE)
    gone.check_prefix(ErrorKind.CANCELLED)
    assert late.sender.error[1] == "the request's timeout of 50000 us has passed"
    for ask in before:
        ask.check()
    assert slow.texts == [hash_text([9])] * 2


def test_a_deadline_runs_from_the_arrival(router, slow) -> None:
    """Also while the prompt is tokenised: what comes of that is not computed for as long again."""
    late = Ask([9], {"max_tokens": 200, "ignore_eos": True}, timeout_us=200_000)
    started = time.monotonic()
    router.submit(late.inbound())
    time.sleep(0.25)
    slow.may_go_on.set()
    late.check_prefix(ErrorKind.UNAVAILABLE)
    assert time.monotonic() - started < 0.4


def test_long_prompts_do_not_keep_short_ones_waiting(router, slow, monkeypatch) -> None:
    monkeypatch.setattr("backend_lib.router.intake_queue.LONG_BYTES", 3)
    slow._slow = hash_text([9, 9])
    long = [Ask([9, 9], {"max_tokens": 1}) for _ in range(3)]
    short = Ask([5], {"max_tokens": 1})
    for ask in (*long, short):
        router.submit(ask.inbound())
    short.check(timeout=5)
    slow.may_go_on.set()
    for ask in long:
        ask.check()


def test_text_that_waits_is_bounded(router, slow, monkeypatch) -> None:
    monkeypatch.setattr("backend_lib.router.intake_queue.MAX_BYTES", 10)
    fits = [Ask([9], {"max_tokens": 1}) for _ in range(3)]
    refused = Ask([9], {"max_tokens": 1})
    for ask in (*fits, refused):
        router.submit(ask.inbound())
    assert refused.sender.done.is_set()  # before submit returned
    assert refused.sender.error == (ErrorKind.UNAVAILABLE, "the requests that wait to be read have more than 256 MiB")
    slow.may_go_on.set()
    for ask in fits:
        ask.check()
    assert router._intake_queue._num_bytes == 0


def test_the_longest_prompt_gets_one_token(router) -> None:
    ask = Ask([5] * 255, {"max_tokens": 1})
    router.submit(Ask([5] * 255, {"max_tokens": 100}, sender=ask.sender).inbound())
    ask.check()


def test_output_is_cut_where_the_context_ends(router) -> None:
    ask = Ask([5] * 250, {"max_tokens": 6, "ignore_eos": True})
    router.submit(Ask([5] * 250, {"max_tokens": 1000, "ignore_eos": True}, sender=ask.sender).inbound())
    ask.check()


def test_kv_memory_smaller_than_the_context_bounds_a_request(folder) -> None:
    with running_router(folder, kv_tokens=32, max_running=2) as router:
        too_long = Ask([5] * 32, {"max_tokens": 1})
        fits = Ask([5] * 20, {"max_tokens": 12, "ignore_eos": True})
        router.submit(too_long.inbound())
        router.submit(Ask([5] * 20, {"max_tokens": 99, "ignore_eos": True}, sender=fits.sender).inbound())
        fits.check()
        assert too_long.sender.wait().error[0] is ErrorKind.INVALID_ARG
        assert_level(router)


def test_min_tokens_up_to_max_tokens_ends_by_length(router) -> None:
    asks = [Ask([number, 9], {"max_tokens": 80, "min_tokens": 80}) for number in range(3, 20)]
    for ask in asks:
        router.submit(ask.inbound())
    for ask in asks:
        ask.check()
        assert ask.sender.finish is FinishReason.LENGTH


def test_an_end_by_token_is_seen_often_enough_to_be_tested() -> None:
    prompts = [random_prompt(random.Random(seed)) for seed in range(50)]
    assert sum(EOS in list(expected_ids(prompt, 60)) for prompt in prompts) > 10


def test_a_model_that_is_not_there_is_told_in_words(tmp_path) -> None:
    before = worker_pids()
    with pytest.raises((ValueError, OSError), match="nothing_here"):
        Router(Settings(model=str(tmp_path / "nothing_here")))
    with pytest.raises(ValueError, match="has no safetensors weights"):
        Router(Settings(model=str(make_config_folder(tmp_path / "llama"))))
    assert worker_pids() == before


def test_what_a_worker_cannot_load_is_told_in_its_words(tmp_path) -> None:
    before = worker_pids()
    folder = make_config_folder(tmp_path / "llama")
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(RuntimeError, match=r"worker \d+ ended with status 1: ValueError: .*not a whole safetensors"):
        Router(Settings(model=str(folder), threads=1))
    assert worker_pids() == before


def test_a_worker_that_cannot_be_spawned_is_told(folder, monkeypatch) -> None:
    """Not a wait without end: the one who loads the model holds the server."""
    monkeypatch.setattr("backend_lib.router.worker_process.python_executable", lambda: "/no/such/python")
    with pytest.raises(RuntimeError, match=r"a worker could not be started: .*no/such/python"):
        Router(Settings(model=str(folder), threads=1))
