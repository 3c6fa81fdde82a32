"""Ends of the server and of the model while clients of every kind run and wait: each of them is told, nothing stays.

Each test takes some seconds to build its load, so those whose kind of end is told otherwise, too, are long ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.clients import HttpClient
from tests.support.hashing import GREEDY, PROMPT, answer
from tests.support.mixed_load import CLOSED, SETTINGS, MixedLoad
from tests.support.processes import wait_ended
from tests.support.serve import COMMAND, Served, tandem_serve
from tests.support.server import RunningServer, running_server

EXIT_TIMEOUT = 3  # seconds
DRAIN = 1  # seconds
UNLOADING = "the model is being unloaded"


@pytest.fixture
def loaded(hash_checkpoint: Path) -> Iterator[tuple[RunningServer, MixedLoad]]:
    """A server with its load. On leaving, `running_server` looks for processes and shared memory that are left."""
    with running_server(
        model=hash_checkpoint,
        settings=SETTINGS | {"drain_seconds": DRAIN},
        repository_mode="explicit",
        extra_flags=[f"--exit-timeout-secs={EXIT_TIMEOUT}"],
    ) as server:
        yield server, MixedLoad(server.http_url, server.grpc_url, server.metrics_url)


def ended_by(server: RunningServer, pid: int, number: int, *, group: bool = False) -> None:
    """Send the signal; from the stub's end on, the workers have two seconds."""
    stub, workers = psutil.Process(server.stub_pid), [psutil.Process(each) for each in server.worker_pids]
    assert workers
    (os.killpg if group else os.kill)(pid, number)
    assert not wait_ended([stub], EXIT_TIMEOUT + 10)
    assert not wait_ended(workers, 2)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_stop(loaded, number):
    """SIGINT goes to the whole group, as a terminal sends it. Triton's own time limit cuts who is connected."""
    server, load = loaded
    ended_by(server, server.pid, number, group=number == signal.SIGINT)
    load.wait_ended(10)
    assert not wait_ended([psutil.Process(server.pid)], 10)


@pytest.mark.long
def test_sigkill_of_tritonserver(loaded):
    server, load = loaded
    ended_by(server, server.pid, signal.SIGKILL)
    load.wait_ended(5)


@pytest.mark.long
def test_sigkill_of_the_stub(loaded):
    """Triton tells nobody that its stub has died, so its clients wait until the server itself ends."""
    server, load = loaded
    ended_by(server, server.stub_pid, signal.SIGKILL)
    server.process.kill()
    load.wait_ended(5)


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.long)])
def test_unload(loaded, rounds):
    """Who runs is told after the drain; nothing stays, and no descriptor of tritonserver's from round to round."""
    server, load = loaded
    http = HttpClient(server.http_url)
    descriptors = []
    for _ in range(rounds):
        unload(server, http, load)
        descriptors.append(psutil.Process(server.pid).num_fds())
        assert http.load().status_code == 200
        assert http.generate(PROMPT, max_tokens=3, **GREEDY)["text_output"] == PROMPT + answer(3)
        if rounds > 1:
            load = MixedLoad(server.http_url, server.grpc_url, server.metrics_url)
    assert descriptors[-1] <= descriptors[0] + 4


def unload(server: RunningServer, http: HttpClient, load: MixedLoad) -> None:
    family = psutil.Process(server.pid).children(recursive=True)
    assert http.unload().status_code == 200
    load.wait_ended(DRAIN + 10)
    assert all(UNLOADING in client.ending or "no available versions" in client.ending for client in load.clients)
    assert not wait_ended(family, 10)
    http.wait_unloaded()
    assert not list(Path("/dev/shm").glob(f"{server.process.shm_prefix}*"))


# The same below `tandem serve`


@contextlib.contextmanager
def serve_loaded(folder: Path, checkpoint: Path) -> Iterator[tuple[Served, MixedLoad]]:
    settings = [f"--set={name}={value}" for name, value in (SETTINGS | {"drain_seconds": DRAIN}).items()]
    command = [*COMMAND, "--model", str(checkpoint), *settings]
    with tandem_serve(folder, f"--exit-timeout-secs={EXIT_TIMEOUT}", command=command) as served:
        ports = dict(each[2:].split("-port=") for each in served.popen.args if "-port=" in each)
        http, grpc, metrics = (f"127.0.0.1:{ports[name]}" for name in ("http", "grpc", "metrics"))
        yield served, MixedLoad(f"http://{http}", grpc, f"http://{metrics}/metrics")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT])
def test_tandem_serve_stops_politely(tmp_path, hash_checkpoint, number):
    with serve_loaded(tmp_path, hash_checkpoint) as (served, load):
        os.killpg(served.popen.pid, number)
        assert served.wait_end(EXIT_TIMEOUT + 10) == 0
        load.wait_ended(2)
    assert not list(tmp_path.glob("tandem-*"))


@pytest.mark.parametrize(
    ("victim", "code"),
    [
        ("triton_python_backend_stub", 1),
        pytest.param("tritonserver", 128 + signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_tandem_serve_ends_with_what_it_watches(tmp_path, hash_checkpoint, victim, code):
    with serve_loaded(tmp_path, hash_checkpoint) as (served, load):
        killed = time.monotonic()
        os.kill(served.child(victim), signal.SIGKILL)
        assert served.wait_end(2) == code
        load.wait_ended(2)
        print(f"told after {max(client.ended for client in load.clients) - killed:.2f} s")
    assert {client.ending for client in load.clients if client.name.startswith("HTTP")} == {CLOSED}
    assert not list(tmp_path.glob("tandem-*"))


def test_tritonserver_may_crash_on_its_way_out(tmp_path, hash_checkpoint):
    """It does so at times while it cuts connections. The end was asked for, so it is no failure of the command."""
    with serve_loaded(tmp_path, hash_checkpoint) as (served, load):
        tritonserver = served.child("tritonserver")
        served.popen.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        os.kill(tritonserver, signal.SIGSEGV)
        assert served.wait_end(5) == 0
        assert "on its way out" in served.said()
        load.wait_ended(2)
