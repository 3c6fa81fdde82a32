"""Load, stream, cancel and unload again and again: nothing may pile up. And what a router that only waits costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.support.clients import HttpClient, grpc_stream
from tests.support.hashing import ENDLESS, GREEDY, PROMPT, answer
from tests.support.processes import wait_ended
from tests.support.server import RunningServer, running_server

MIB = 1 << 20
WARM_UP = 3  # rounds after which Triton and its allocator have what they keep
RSS_PER_ROUND = 1 * MIB  # tritonserver itself keeps some memory of every model that it has loaded


class Footprint(NamedTuple):
    """What a server without a model holds."""

    processes: int
    descriptors: int
    threads: int
    rss: int
    shared_memory: int


@pytest.fixture
def explicit(hash_checkpoint: Path) -> Iterator[RunningServer]:
    with running_server(
        model=hash_checkpoint, repository_mode="explicit", settings={"max_running": 2, "drain_seconds": 1}
    ) as running:
        yield running


def footprint(server: RunningServer) -> Footprint:
    triton = psutil.Process(server.pid)
    regions = list(Path("/dev/shm").glob(f"{server.process.shm_prefix}*"))
    return Footprint(
        len(triton.children(recursive=True)),
        triton.num_fds(),
        triton.num_threads(),
        triton.memory_info().rss,
        len(regions),
    )


def live_once(server: RunningServer) -> Footprint:
    """Load, answer, cancel a gRPC and an HTTP stream, unload; what is left then."""
    http = HttpClient(server.http_url)
    assert http.load().status_code == 200
    family = psutil.Process(server.pid).children(recursive=True)
    assert http.generate(PROMPT, max_tokens=5, **GREEDY)["text_output"] == PROMPT + answer(5)
    with grpc_stream(server.grpc_url) as stream:
        stream.send(PROMPT, stream=True, parameters=ENDLESS)
        stream.next()
    pieces = http.stream(PROMPT, **ENDLESS)
    next(pieces)
    pieces.close()
    assert http.unload().status_code == 200
    assert not wait_ended(family, 20)
    http.wait_unloaded()
    return footprint(server)


@pytest.mark.parametrize("rounds", [7, pytest.param(50, marks=pytest.mark.long)])
def test_loading_and_unloading_leaves_nothing_behind(explicit, rounds):
    prints = [live_once(explicit) for _ in range(rounds)]
    first, last = prints[WARM_UP - 1], prints[-1]
    print(*prints, sep="\n")
    assert last.processes == first.processes == 0
    assert last.shared_memory == first.shared_memory
    assert abs(last.descriptors - first.descriptors) <= 4
    assert abs(last.threads - first.threads) <= 4
    assert last.rss - first.rss < RSS_PER_ROUND * (rounds - WARM_UP) + 16 * MIB


def test_the_router_loads_neither_torch_nor_cuda(hash_server, http):
    http.generate(PROMPT, max_tokens=2)
    maps = Path(f"/proc/{hash_server.stub_pid}/maps").read_text()
    libraries = {Path(line.split()[-1]).name for line in maps.splitlines() if "/" in line}
    assert any(name.startswith("libpython") for name in libraries)
    loaded = [
        name for name in libraries if name.startswith(("libtorch", "libc10", "libcuda.", "libcublas", "libtriton."))
    ]
    assert not loaded
    # The same look at the worker finds torch, so it would have been seen.
    (worker,) = hash_server.worker_pids
    assert "libtorch_cpu.so" in Path(f"/proc/{worker}/maps").read_text()


def test_an_idle_server_uses_almost_no_cpu(hash_server, http):
    """tritonserver, router and worker together."""
    http.generate(PROMPT, max_tokens=2)
    time.sleep(0.5)
    family = [psutil.Process(hash_server.pid), *psutil.Process(hash_server.pid).children(recursive=True)]
    used = {process: -_cpu_seconds(process) for process in family}
    started = time.monotonic()
    time.sleep(3)
    seconds = time.monotonic() - started
    for process in family:
        used[process] += _cpu_seconds(process)
    print({process.name(): f"{100 * spent / seconds:.2f} %" for process, spent in used.items()})
    assert sum(used.values()) / seconds < 0.05


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
