"""What a server holds, and whether it holds no more than before."""

from __future__ import annotations

import contextlib
import json
import queue
import time
from typing import Any, NamedTuple

import psutil

from tests.support.checkpoints import hash_text
from tests.support.clients import GrpcStream, grpc_stream
from tests.support.metrics import Scrape
from tests.support.server import RunningServer

MIB = 1 << 20
# Triton keeps a few descriptors and threads more at times of load, and allocators some memory. In the stub it is above
# all the tokenizer's cache: up to 10,000 words, and a prompt of the test-only model is one word, of some 3 KB there.
SLACK = {"server descriptors": 8, "server threads": 8, "server MiB": 24, "stub MiB": 24}


class Level(NamedTuple):
    """By name: gauges of requests and KV, and of tritonserver and the stub what the system knows."""

    values: dict[str, float]

    @classmethod
    def of(cls, server: RunningServer) -> Level:
        scrape, processes = Scrape.of(server.metrics_url), {"server": server.pid, "stub": server.stub_pid}
        values = {state: scrape.get(f"tandem_requests_{state}") for state in ("running", "waiting", "paused")}
        values["kv"] = scrape.get("tandem_kv_tokens", state="used")
        values["processes"] = len(psutil.Process(server.pid).children(recursive=True))
        for name, pid in processes.items():
            process = psutil.Process(pid)
            values |= {f"{name} descriptors": process.num_fds(), f"{name} threads": process.num_threads()}
            values[f"{name} MiB"] = process.memory_info().rss / MIB
        return cls(values)

    def above(self, before: Level) -> dict[str, tuple[float, float]]:
        """What is more than it was, and how much it was."""
        return {
            name: (value, before.values[name])
            for name, value in self.values.items()
            if value > before.values[name] + SLACK.get(name, 0)
        }


def wait_idle(server: RunningServer, timeout: float = 30.0) -> Level:
    """What is held once nothing runs or waits; the gauges follow within some seconds."""
    nothing = Level(dict.fromkeys(("running", "waiting", "paused", "kv"), 0.0))
    deadline = time.monotonic() + timeout
    while held := _held(level := Level.of(server), nothing):
        assert time.monotonic() < deadline, f"still held: {held}"
        time.sleep(0.1)
    return level


def _held(level: Level, nothing: Level) -> dict[str, float]:
    return {name: level.values[name] for name in nothing.values if level.values[name] > 0}


def assert_level(server: RunningServer, before: Level, timeout: float = 30.0) -> Level:
    """Wait until no more is held than before."""
    deadline = time.monotonic() + timeout
    while above := (level := Level.of(server)).above(before):
        assert time.monotonic() < deadline, f"more than before: {above}"
        time.sleep(0.1)
    return level


def assert_slots_free(server: RunningServer, slots: int, long: dict[str, Any]) -> None:
    """All of the slots can be taken at the same time, and not one more. `long`: a request that goes on meanwhile."""
    with grpc_stream(server.grpc_url) as stream:
        for number in range(slots):
            _send(stream, str(number), long)
        _send(stream, "one more", long)
        refused = _first_error(stream)
        assert refused == {"the queue is full"}, f"{refused} with {slots} slots"


def _send(stream: GrpcStream, name: str, parameters: dict[str, Any]) -> None:
    stream.send(hash_text([5, 6]), request_id=name, sampling_parameters=json.dumps(parameters))


def _first_error(stream: GrpcStream) -> set[str]:
    """The kinds of errors that come while the requests are under way: one."""
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(stream.next(timeout=1.0))
    errors = [each.error for each in found if each.error]
    assert len(errors) <= 1, errors
    return {error.partition(":")[0] for error in errors}
