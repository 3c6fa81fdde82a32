"""Two copies of the weights behind one router, as clients of a real server see them."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from backend_lib.cores import usable_cores
from tests.support.checkpoints import hash_text
from tests.support.clients import TIMEOUT, HttpClient, grpc_stream
from tests.support.hashing import GREEDY, answer
from tests.support.metrics import Scrape, wait_metrics
from tests.support.processes import wait_ended
from tests.support.server import RunningServer, running_server

GROUPS = 2
KV = 60_000
SETTINGS = {"data_parallel": GROUPS, "max_running": 8, "kv_tokens": KV, "drain_seconds": 1}


@pytest.fixture(scope="module")
def two(hash_checkpoint: Path) -> Iterator[RunningServer]:
    with running_server(model=hash_checkpoint, settings=SETTINGS, repository_mode="explicit") as running:
        yield running


@pytest.fixture
def client(two: RunningServer) -> HttpClient:
    return HttpClient(two.http_url)


def ready_lines(server: RunningServer, group: int) -> list[int]:
    """Pids of the workers that have been ready in a group so far."""
    return [int(pid) for pid in re.findall(rf"worker (\d+) of group {group} is ready", server.log)]


def wait_said(server: RunningServer, words: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while words not in server.log:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.005)


def prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(count)]


def cached(client: HttpClient, ids: list[int], **fields) -> int:
    """How much of a prompt was in the cache of the group that computed it."""
    fields |= {"max_tokens": 4, "return_num_cached_tokens": True, "exclude_input_in_output": True}
    said = client.generate(hash_text(ids), **fields, **GREEDY)
    assert said["text_output"] == answer(4, ids)
    return said["num_cached_tokens"]


def test_workers_have_their_cores(two) -> None:
    own = [os.sched_getaffinity(ready_lines(two, group)[-1]) for group in range(GROUPS)]
    if usable_cores() >= GROUPS:
        assert all(own) and not own[0] & own[1]
        assert "2 workers have cores of their own" in two.log
    else:
        assert own[0] == own[1] == os.sched_getaffinity(0)
        assert "2 workers share the cores, of which they may use 1; threads of each: 1" in two.log


def test_a_request_may_name_its_group(client) -> None:
    ids = prompt(random.Random(1), 200)
    assert [cached(client, ids, dp_rank=0), cached(client, ids, dp_rank=0)] == [0, 199]
    assert [cached(client, ids, dp_rank=1), cached(client, ids, dp_rank="1")] == [0, 199]


@pytest.mark.parametrize("rank, shown", [(2, "2"), (-1, "-1"), (1.5, "1.5"), ("first", "'first'"), (True, "True")])
def test_a_group_that_is_not_there_is_refused(client, rank, shown: str) -> None:
    status, words = client.error("a", dp_rank=rank)
    assert status == 400 and f"'dp_rank' is {shown}; allowed is a whole number from 0 to 1" in words


def test_a_conversation_stays_where_its_beginning_is_cached(client) -> None:
    """In an order in which taking turns would be wrong half of the time."""
    rng = random.Random(2)
    conversations = [prompt(rng, 150) for _ in range(6)]
    assert [cached(client, ids) for ids in conversations] == [0] * 6
    for _ in range(2):
        rng.shuffle(conversations)
        for ids in conversations:
            before = len(ids)
            ids += prompt(rng, 30)
            assert cached(client, ids) >= before


class Reader:
    """One stream, read in a thread of its own, which notes when what has come."""

    def __init__(self, server: RunningServer, ids: list[int], count: int, **fields) -> None:
        self.ids, self.count = ids, count
        self.text, self.times = "", [time.monotonic()]
        parameters = {"max_tokens": count, "stream_interval": 4} | GREEDY | fields
        self._thread = threading.Thread(target=self._read, args=(server, parameters))
        self._thread.start()

    def _read(self, server: RunningServer, parameters: dict) -> None:
        with grpc_stream(server.grpc_url) as stream:
            stream.send(hash_text(self.ids), stream=True, parameters=parameters)
            is_over = False
            while not is_over:
                response = stream.next()
                assert not response.error, response.error
                self.text, is_over = self.text + response.text, response.final
                self.times.append(time.monotonic())

    def check(self) -> None:
        self._thread.join()
        assert self.text == answer(self.count, self.ids)

    def longest_pause(self, since: float) -> float:
        times = [each for each in self.times if each > since]
        return max(after - before for before, after in zip([since, *times], times, strict=False))


def test_the_death_of_one_groups_worker_is_no_pause_for_the_other(two, client) -> None:
    rng = random.Random(3)
    restarts = Scrape.of(two.metrics_url).get("tandem_worker_restarts_total")
    readers = [Reader(two, prompt(rng, 20), 4000, dp_rank=number % GROUPS) for number in range(8)]
    busy = wait_metrics(two.metrics_url, lambda scrape: scrape.get("tandem_requests_running") == 8)
    assert busy.get("tandem_workers_ready") == GROUPS
    assert sum(busy.get("tandem_kv_tokens", state=state) for state in ("used", "cached", "free")) == GROUPS * KV
    lives = ready_lines(two, 1)
    killed = time.monotonic()
    os.kill(lives[-1], signal.SIGKILL)
    wait_said(two, f"worker {lives[-1]} of group 1 was killed by SIGKILL; starting another")
    for _ in range(4):
        assert cached(client, prompt(rng, 10)) == 0
    assert ready_lines(two, 1) == lives, "answered by the other group, while there is no worker in this one"
    for reader in readers:
        reader.check()
    pauses = [[reader.longest_pause(killed) for reader in readers[group::GROUPS]] for group in range(GROUPS)]
    assert max(pauses[0]) < min(pauses[1]) / 2, pauses
    scrape = wait_metrics(two.metrics_url, lambda each: each.get("tandem_requests_running") == 0)
    assert scrape.get("tandem_worker_restarts_total") == restarts + 1
    assert scrape.get("tandem_workers_ready") == GROUPS
    assert "Traceback" not in two.log


# Last: the model is unloaded.


def test_unloading_ends_all_workers(two, client) -> None:
    workers = [psutil.Process(pid) for pid in two.worker_pids]
    assert len(workers) == GROUPS
    assert client.unload().status_code == 200
    client.wait_unloaded()
    assert wait_ended(workers, 5) == []
