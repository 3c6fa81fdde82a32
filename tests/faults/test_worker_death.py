"""What clients see when a worker or the router dies. The hash model makes every continuation exact."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from backend_lib.router import router as router_module
from backend_lib.router import supervisor
from backend_lib.router.reply import ErrorKind
from backend_lib.router.router import Router
from backend_lib.router.watcher import SERVING_PERIOD
from tests.support.checkpoints import hash_text, make_hash_checkpoint
from tests.support.engine import (
    EOS,
    VOCAB,
    Ask,
    assert_level,
    expected_ids,
    random_prompt,
    running_router,
    wait_until,
    worker_pid,
)
from tests.support.senders import ListSender

ROOT = Path(__file__).parents[2]
SETTINGS = {"max_running": 8, "kv_tokens": 6000, "prefill_chunk": 64}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "hash"


@pytest.fixture
def long_folder(folder):
    """A context so long that streams last for a while."""
    return make_hash_checkpoint(folder, vocab_size=VOCAB, eos_token_id=EOS, max_position=1024)


def kill_worker(router: Router) -> int:
    """Returns its pid, once it is no more."""
    pid = worker_pid(router)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid))
    return pid


def wait_next_worker(router: Router, before: int) -> int:
    wait_until(lambda: worker_pid(router) not in (None, before))
    return worker_pid(router)


class Gate(ListSender):
    """A streaming client that takes its time once it has had `after` responses, until it is let go on."""

    def __init__(self, after: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        super().__init__(lambda reply: self._on_reply(after))

    def _on_reply(self, after: int) -> None:
        if len(self.replies) == after:
            self.reached.set()
            self.go_on.wait(10)


def sixteen_streams(rng: random.Random) -> list[Ask]:
    """Of different kinds; eight run and eight wait. None ends soon."""
    kinds = [
        {"stream": True},
        {"stream": False},
        {"stream": True, "stream_interval": 7},
        {"stream": True, "temperature": 4.0, "seed": rng.getrandbits(64)},
        {"stream": True, "min_tokens": 300, "ignore_eos": False},
        {"stream": True, "stop_token_ids": [9]},
        {"stream": True},
        {"stream": False, "temperature": 1.0, "seed": (1 << 64) - 1},
    ]
    asks = []
    for kind in kinds * 2:
        prompt = random_prompt(rng, 1, 90)
        asks.append(Ask(prompt, {"max_tokens": 600, "ignore_eos": True} | kind))
    text = hash_text(list(expected_ids(asks[6].prompt, 600)))
    asks[6].parameters["stop"] = [text[400:403]]
    return asks


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_every_stream_goes_on_where_it_was(long_folder, overlap: str) -> None:
    asks = sixteen_streams(random.Random(len(overlap)))
    with running_router(long_folder, overlap=overlap, **SETTINGS) as router:
        for ask in asks:
            router.submit(ask.inbound())
        for tokens in (10, 200):
            wait_until(lambda tokens=tokens: asks[0].sender.num_tokens >= tokens)
            kill_worker(router)
            assert sum(ask.sender.done.is_set() for ask in asks) < 8, "too late to show anything"
        for ask in asks:
            ask.check()
        assert_level(router)


def test_at_any_moment_of_a_streams_life(folder) -> None:
    """A death every so often, wherever the worker is, with requests that come all the time."""
    rng = random.Random(5)
    with running_router(folder, **SETTINGS) as router:
        pid = worker_pid(router)
        for _ in range(3):
            asks = [
                Ask(random_prompt(rng), {"max_tokens": rng.choice([1, 30, 120]), "stream": rng.random() < 0.5})
                for _ in range(60)
            ]
            for ask in asks:
                router.submit(ask.inbound())
            time.sleep(rng.random() * 0.03)
            kill_worker(router)
            for ask in asks:
                ask.check()
            pid = wait_next_worker(router, pid)
        assert_level(router)


def test_a_worker_that_dies_while_it_loads_costs_nobody_anything(long_folder) -> None:
    asks = sixteen_streams(random.Random(3))
    with running_router(long_folder, **SETTINGS) as router:
        for ask in asks:
            router.submit(ask.inbound())
        wait_until(lambda: asks[0].sender.num_tokens >= 10)
        pid = kill_worker(router)
        for _ in range(2):
            wait_next_worker(router, pid)
            pid = kill_worker(router)
        for ask in asks:
            ask.check()
        assert_level(router)


def test_workers_that_are_killed_as_soon_as_they_are_up_cost_nobody_anything(long_folder, monkeypatch) -> None:
    """Nor while they load, more often than a load is tried that fails by itself."""
    monkeypatch.setattr(router_module, "MAX_FAILED_STARTS", 2)
    asks = sixteen_streams(random.Random(4))
    with running_router(long_folder, **SETTINGS) as router:
        for ask in asks:
            router.submit(ask.inbound())
        pid = kill_worker(router)
        for is_up in (False, True, False, False, True, False, True, True):
            wait_next_worker(router, pid)
            wait_until(lambda is_up=is_up: not is_up or router._groups.all[0]._up)
            pid = kill_worker(router)
        for ask in asks:
            ask.check()
        assert_level(router)


def test_who_is_cancelled_while_no_worker_is_up_is_answered_and_not_computed(folder) -> None:
    gone = Ask([5], {"max_tokens": 250, "ignore_eos": True, "stream": True})
    waits = Ask([6], {"max_tokens": 250, "ignore_eos": True, "stream": True})
    with running_router(folder, max_running=2, kv_tokens=512) as router:
        for ask in (gone, waits):
            ask.sender = Gate(after=5)
            router.submit(ask.inbound())
            assert ask.sender.reached.wait(20)
        pid = kill_worker(router)
        gone.sender.cancelled = True
        for ask in (gone, waits):
            ask.sender.go_on.set()
        # Both may have been computed to their end by now; what counts is that nothing hangs and nothing stays.
        assert gone.sender.wait(5)
        wait_next_worker(router, pid)
        waits.check()
        assert_level(router)


def test_a_request_that_kills_each_worker_is_failed_and_the_others_finish(folder) -> None:
    """The router is made to admit a prompt that leaves the KV table: the worker fails in the midst of its prefill."""
    others = [Ask([5, number], {"max_tokens": 240, "ignore_eos": True, "stream": True}) for number in range(10, 14)]
    poison = Ask([7] * 300, {"max_tokens": 1})
    with running_router(folder, prefill_chunk=16, kv_tokens=2000, max_running=8) as router:
        router._intake.max_len = 1000
        for ask in (*others[:2], poison, *others[2:]):
            router.submit(ask.inbound())
        kind, words = poison.sender.wait(30).error
        assert kind is ErrorKind.INTERNAL
        assert words == "the worker died 3 times while it computed this request, the last time nothing else"
        assert router._arena.epoch(0) == 3  # each death was its own
        for ask in others:
            ask.check()
        assert_level(router)


def test_a_model_that_cannot_be_loaded_again_is_told_and_may_come_back(folder, monkeypatch) -> None:
    """Triton is told that it is not ready, and passes that on when it is asked whether the model is wanted."""
    monkeypatch.setattr(supervisor, "BACK_OFF", (0.0, 0.2))
    monkeypatch.setattr(router_module, "MAX_FAILED_STARTS", 2)
    asks = [Ask([5, number], {"max_tokens": 250, "ignore_eos": True}) for number in range(10, 26)]
    with running_router(folder, is_serving=lambda: router.is_ready(), drain_seconds=0, **SETTINGS) as router:
        (folder / "config.json").rename(folder / "hidden")
        assert router.is_ready()
        kill_worker(router)
        for ask in asks:
            router.submit(ask.inbound())
        for ask in asks:
            kind, words = ask.sender.wait(20).error
            assert kind is ErrorKind.UNAVAILABLE and "the model cannot be loaded: worker" in words
        assert not router.is_ready()
        time.sleep(2 * SERVING_PERIOD)  # the watcher asks meanwhile
        (folder / "hidden").rename(folder / "config.json")
        again = Ask([5], {"max_tokens": 20})
        wait_until(router.is_ready)
        router.submit(again.inbound())
        again.check()
        assert_level(router)


def test_close_answers_every_open_stream_and_ends_the_worker(long_folder) -> None:
    """Also those whose client is slow just then, and those that wait in the queue."""
    asks = [Ask([5, number], {"max_tokens": 900, "ignore_eos": True, "stream": True}) for number in range(10, 40)]
    for ask in asks[:4]:
        ask.sender = Gate(after=3)
    with running_router(long_folder, **SETTINGS) as router:
        for ask in asks:
            router.submit(ask.inbound())
        for ask in asks[:4]:
            assert ask.sender.reached.wait(20)
        closer = threading.Thread(target=router.close)
        closer.start()
        time.sleep(0.3)
        for ask in asks[:4]:
            ask.sender.go_on.set()
        closer.join(5)
        assert not closer.is_alive() and worker_pid(router) is None
        open_asks = [ask for ask in asks if not ask.sender.finish]  # on a busy machine some had ended before
        assert set(map(id, asks[:4])) <= set(map(id, open_asks))
        for ask in open_asks:
            ask.check_prefix(ErrorKind.UNAVAILABLE, timeout=0)
            assert ask.sender.error[1] == "the model is being unloaded"
        late = Ask([5], {"max_tokens": 1})
        router.submit(late.inbound())
        assert late.sender.wait(0).error == (ErrorKind.UNAVAILABLE, "the model is being unloaded")
        router.close = lambda: None  # it is closed


_ROUTER = """
import sys, time
from pathlib import Path
from tests.support.engine import EOS, VOCAB, Ask, running_router, worker_pid
with running_router(Path(sys.argv[1])) as router:
    ask = Ask([5], {"max_tokens": 250, "ignore_eos": True, "stream": True})
    if sys.argv[2] == "busy":
        router.submit(ask.inbound())
    print(worker_pid(router), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
def test_a_worker_does_not_outlive_its_router(folder, state: str) -> None:
    command = [sys.executable, "-c", _ROUTER, str(folder), state]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(process.stdout.readline())
        assert psutil.pid_exists(pid)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, timeout=2)


_STUCK_ROUTER = """
import ctypes, os, sys
from pathlib import Path
from backend_lib.config import Settings
from backend_lib.router.router import Router
from tests.support.engine import worker_pid
router = Router(Settings(model=sys.argv[1], threads=1), server=os.pidfd_open(os.getppid()))
print(os.getpid(), worker_pid(router), flush=True)
ctypes.PyDLL(None).sleep(60)  # keeps Python's lock, as a thread does that waits in C for a server that is dead
"""
_SERVER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def test_a_router_that_is_stuck_does_not_outlive_its_server(tmp_path) -> None:
    folder = make_hash_checkpoint(tmp_path / "hash", vocab_size=VOCAB, eos_token_id=EOS)
    command = [sys.executable, "-c", _SERVER, _STUCK_ROUTER, str(folder)]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(pid) for pid in server.stdout.readline().split()]
        assert all(map(psutil.pid_exists, pids))
    finally:
        server.kill()
        server.wait()
    wait_until(lambda: not any(map(psutil.pid_exists, pids)), timeout=2)
