"""The life of `tandem serve`: ready, then ended by a signal or by the death of what it watches; nothing may stay."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import requests

from tests.support.echo import make_echo_repository
from tests.support.serve import COMMAND, ROOT, tandem_serve
from tests.support.server import free_ports


@pytest.fixture
def echo(tmp_path: Path) -> list[str]:
    """The command that serves the echo model."""
    return [*COMMAND, "--model-repository", str(make_echo_repository(tmp_path / "repository"))]


def test_the_printed_line_streams_an_answer(tmp_path, echo):
    with tandem_serve(tmp_path, command=echo) as served:
        assert shlex.split(served.example)[0] == "curl"
        assert served.post_example().rstrip().endswith('"text_output":"is"}')
        assert "llm is ready after" in served.said()


def test_a_proxy_is_not_asked_for_this_machine(tmp_path, echo, monkeypatch):
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with tandem_serve(tmp_path, command=echo) as served:
        assert "llm is ready after" in served.said()


@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_an_address_triton_does_not_understand_is_served(tmp_path, echo, address):
    flags = [f"--{door}-address={address}" for door in ("http", "grpc", "metrics")]
    with tandem_serve(tmp_path, *flags, command=echo) as served:
        assert served.post_example().rstrip().endswith('"text_output":"is"}')


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_politely(tmp_path, echo, number):
    with tandem_serve(tmp_path, command=echo) as served:
        # To the whole group, as a terminal does.
        os.killpg(served.popen.pid, number)
        assert served.wait_end(15) == 0
    assert not list(tmp_path.glob("tandem-*"))


def test_a_second_signal_ends_at_once(tmp_path, echo):
    with tandem_serve(tmp_path, command=echo) as served:
        served.popen.send_signal(signal.SIGINT)
        time.sleep(1.1)
        served.popen.send_signal(signal.SIGINT)
        assert served.wait_end(1) != 0


def test_a_doubled_signal_counts_once(tmp_path, echo):
    with tandem_serve(tmp_path, command=echo) as served:
        served.popen.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        os.killpg(served.popen.pid, signal.SIGTERM)
        assert served.wait_end(15) == 0


def test_the_death_of_the_stub_ends_the_server_within_two_seconds(tmp_path, echo):
    with tandem_serve(tmp_path, command=echo) as served:
        os.kill(served.child("triton_python_backend_stub"), signal.SIGKILL)
        assert served.wait_end(2) == 1
        assert "process for llm died" in served.said()


def test_the_servers_own_exit_code_is_passed_on(tmp_path, echo):
    with tandem_serve(tmp_path, command=echo) as served:
        os.kill(served.child("tritonserver"), signal.SIGKILL)
        assert served.wait_end(2) == 128 + signal.SIGKILL


def test_a_server_that_ends_by_itself_is_no_death_of_the_stub(tmp_path, echo):
    with tandem_serve(tmp_path, command=echo) as served:
        os.kill(served.child("tritonserver"), signal.SIGTERM)
        assert served.wait_end(15) == 0


def test_nothing_stays_when_the_command_itself_is_killed(tmp_path, echo):
    with tandem_serve(tmp_path, command=echo) as served:
        served.popen.kill()
        _, alive = psutil.wait_procs(served.family, timeout=10)
        assert not alive
        served.popen.wait()
    with tandem_serve(tmp_path, command=echo) as following:
        assert [each.name.split("_")[0] for each in tmp_path.glob("tandem-*")] == [f"tandem-{following.popen.pid}"]
        assert not list(Path("/dev/shm").glob(f"tandem_{served.popen.pid}_*"))


def test_a_model_that_fails_to_load_is_an_error(tmp_path, echo):
    (tmp_path / "repository/llm/1/model.py").write_text("raise RuntimeError('no such weights')\n")
    done = subprocess.run([*echo, "--", *free_ports()], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no such weights" in done.stderr + done.stdout
    assert "before the model was ready" in done.stderr


def test_a_model_unloaded_on_purpose_is_no_death_and_one_loaded_again_is_watched(tmp_path, echo):
    with tandem_serve(tmp_path, "--model-control-mode=explicit", command=echo) as served:
        url = served.url.partition("/v2/")[0]
        old = psutil.Process(served.child("triton_python_backend_stub"))
        requests.post(f"{url}/v2/repository/models/llm/unload", json={}, timeout=10)
        old.wait(10)
        with pytest.raises(subprocess.TimeoutExpired):
            served.popen.wait(0.5)
        assert requests.post(f"{url}/v2/repository/models/llm/load", json={}, timeout=10).ok
        served.family = psutil.Process(served.popen.pid).children(recursive=True)
        os.kill(served.child("triton_python_backend_stub"), signal.SIGKILL)
        assert served.wait_end(2) == 1


def test_make_serve_ends_with_its_terminal(tmp_path, echo):
    """Make leads the session, as in `xterm -e make serve`."""
    tandem = tmp_path / "venv/bin/tandem"
    tandem.parent.mkdir(parents=True)
    tandem.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND[:-1])} "$@"\n')
    tandem.chmod(0o755)
    (tmp_path / "venv/installed").touch()
    arguments = shlex.join([*echo[len(COMMAND) :], "--", *free_ports()])
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(ROOT)
        os.execvp("make", ["make", "serve", f"VENV={tmp_path / 'venv'}", f"ARGS={arguments}"])
    make = psutil.Process(pid)
    try:
        printed = b""
        while b"is ready after" not in printed:
            printed += os.read(terminal, 4096)
        family = make.children(recursive=True)
    finally:
        os.close(terminal)
    _, alive = psutil.wait_procs([make, *family], timeout=15)
    for each in alive:
        each.kill()
    assert not alive
