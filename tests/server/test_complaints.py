"""What users of other backends have complained of, tried here: docs/complaints.md has the list."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from backend_lib.router.group import LOOKAHEAD
from tests.support.clients import HttpClient, grpc_stream
from tests.support.hashing import ENDLESS, GREEDY, PROMPT, answer, text_of
from tests.support.server import RunningServer, running_server

FINISH = {"return_finish_reason": True, "return_num_output_tokens": True, "exclude_input_in_output": True}


@pytest.fixture(scope="module")
def narrow(hash_checkpoint: Path) -> Iterator[RunningServer]:
    """One sequence at a time, and prompts in very small chunks."""
    settings = {"max_running": 1, "queue_size": 32, "prefill_chunk": 8, "kv_tokens": 1 << 16}
    with running_server(model=hash_checkpoint, settings=settings) as running:
        yield running


def test_an_answer_is_not_cut_after_a_few_tokens(http):
    """Where the request says nothing, `default_max_tokens` or an end token ends it."""
    ended = http.generate(PROMPT, **GREEDY, **FINISH)
    assert (ended["finish_reason"], ended["num_output_tokens"]) == ("length", 2048)
    assert ended["text_output"] == answer(2048)


def test_twenty_clients_at_once_that_do_not_stream(http):
    def ask(count: int) -> str:
        return http.generate(PROMPT, max_tokens=count, **GREEDY, **FINISH)["text_output"]

    counts = [1 + number % 40 for number in range(200)]
    with ThreadPoolExecutor(20) as clients:
        assert list(clients.map(ask, counts)) == [answer(count) for count in counts]


@pytest.mark.parametrize("seconds", [2, pytest.param(100, marks=pytest.mark.long)])
def test_clients_that_leave_at_any_moment(hash_server, http, seconds):
    """Eight of them, over HTTP and gRPC; the server answers as before, and its processes are the same."""
    family = (hash_server.pid, hash_server.stub_pid, hash_server.worker_pids)
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(8) as clients:
        leave = (_leave_http, _leave_grpc)
        rounds = [clients.submit(_leave_again, leave[each % 2], hash_server, each, deadline) for each in range(8)]
    assert sum(each.result() for each in rounds) > 8 * seconds
    assert http.generate(PROMPT, max_tokens=9, **GREEDY, **FINISH)["text_output"] == answer(9)
    assert (hash_server.pid, hash_server.stub_pid, hash_server.worker_pids) == family


def _leave_again(leave: Callable, server: RunningServer, seed: int, deadline: float) -> int:
    rng = random.Random(seed)
    for count in itertools.count():
        if time.monotonic() > deadline:
            return count
        leave(server, rng.randrange(12))


def _leave_http(server: RunningServer, after: int) -> None:
    pieces = HttpClient(server.http_url).stream(PROMPT, **ENDLESS)
    text = "".join(piece["text_output"] for piece in itertools.islice(pieces, after))
    pieces.close()
    assert answer(len(text) + 100).startswith(text)


def _leave_grpc(server: RunningServer, after: int) -> None:
    with grpc_stream(server.grpc_url) as stream:
        stream.send(PROMPT, stream=True, parameters=ENDLESS)
        text = "".join(stream.next().text for _ in range(after))
    assert answer(len(text) + 100).startswith(text)


# A machine that is busy elsewhere


@contextlib.contextmanager
def four_answers(server: RunningServer) -> Iterator[None]:
    """Two streams and two answers in one run over the block, and each of them is whole."""
    client = HttpClient(server.http_url)
    request = {"max_tokens": 1500, **GREEDY}
    whole = lambda: client.generate(PROMPT, **request, exclude_input_in_output=True)["text_output"]  # noqa: E731
    stream = lambda: "".join(piece["text_output"] for piece in client.stream(PROMPT, **request))  # noqa: E731
    with ThreadPoolExecutor(4) as clients:
        texts = [clients.submit(each) for each in (whole, stream) * 2]
        yield
        assert [text.result() for text in texts] == [answer(1500)] * 4


@pytest.mark.parametrize(
    "who", ["router", *(pytest.param(who, marks=pytest.mark.long) for who in ("worker", "tritonserver"))]
)
def test_a_process_that_stands_still_for_two_seconds_loses_nothing(hash_server, who):
    family = (hash_server.stub_pid, hash_server.worker_pids)
    pids = {"tritonserver": hash_server.pid, "router": family[0], "worker": family[1][0]}
    with four_answers(hash_server):
        time.sleep(0.2)
        os.kill(pids[who], signal.SIGSTOP)
        try:
            time.sleep(2)
        finally:
            os.kill(pids[who], signal.SIGCONT)
    assert HttpClient(hash_server.http_url).is_ready()
    assert (hash_server.stub_pid, hash_server.worker_pids) == family


def test_busy_neighbours_cost_nothing_but_time(hash_server, http):
    """Two for each core, while clients are answered and the server is asked whether it is ready."""
    family = (hash_server.stub_pid, hash_server.worker_pids)
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    try:
        with four_answers(hash_server):
            for _ in range(20):
                assert http.is_ready()
                time.sleep(0.05)
    finally:
        for each in neighbours:
            each.kill()
            each.wait()
    assert (hash_server.stub_pid, hash_server.worker_pids) == family


# Long prompts, those who wait, and those who leave before they were answered


def test_a_long_first_prefill_looks_healthy_and_is_answered(narrow):
    """A prompt of 2,500 chunks."""
    ids = [3 + number % 900 for number in range(20_000)]
    client = HttpClient(narrow.http_url)
    workers = narrow.worker_pids
    with ThreadPoolExecutor(1) as clients:
        answered = clients.submit(client.generate, text_of(ids), max_tokens=4, **GREEDY, **FINISH)
        asked = 0
        while not answered.done():
            assert client.is_ready()
            asked += 1
            time.sleep(0.02)
    assert answered.result()["text_output"] == answer(4, ids)
    assert asked > 3
    assert narrow.worker_pids == workers


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_an_http_client_that_goes_while_it_waits_does_not_stay(narrow, endpoint):
    """Triton notices it at the first response, so a stream ends there; the other needs a `timeout`."""
    client = HttpClient(narrow.http_url)
    bound = {"timeout": 1_500_000} if endpoint == "generate" else {}
    with grpc_stream(narrow.grpc_url) as running:
        running.send(PROMPT, stream=True, parameters=ENDLESS)
        running.next()
        _ask_and_go(narrow, endpoint, stream=endpoint == "generate_stream", **ENDLESS, **bound)
    asked = time.monotonic()
    assert client.generate(PROMPT, max_tokens=3, **GREEDY)["text_output"] == PROMPT + answer(3)
    assert time.monotonic() - asked < 10, "it was computed to its end for nobody"


def _ask_and_go(server: RunningServer, endpoint: str, **body: object) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.http_url).netloc)
    connection.request("POST", f"/v2/models/llm/{endpoint}", json.dumps({"text_input": PROMPT, **body}))
    time.sleep(0.3)
    connection.close()


def test_a_higher_priority_overtakes_those_that_wait(narrow):
    """The one that came last goes before all but those that the worker has been given: the next few."""
    client = HttpClient(narrow.http_url)
    order: list[int] = []

    def ask(priority: int) -> None:
        client.generate(PROMPT, max_tokens=100, request_priority=priority, **GREEDY)
        order.append(priority)

    with grpc_stream(narrow.grpc_url) as running, ThreadPoolExecutor(20) as clients:
        running.send(PROMPT, stream=True, parameters=ENDLESS)
        running.next()
        for priority in (*[0] * 19, 7):
            clients.submit(ask, priority)
            time.sleep(0.03)
        running.cancel()
    assert len(order) == 20
    assert order.index(7) <= LOOKAHEAD + 1, order  # two that end together may be seen in either order
