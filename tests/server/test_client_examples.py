"""The examples do what their first lines say, run as a user runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.clients import HttpClient
from tests.support.server import RunningServer

EXAMPLES = Path(__file__).parents[2] / "client_examples"
PARIS = "The capital of France is"


@pytest.fixture(scope="module")
def continuation(server) -> str:
    """The greedy answer to PARIS, 32 tokens long."""
    body = {"max_tokens": 32, "temperature": 0, "exclude_input_in_output": True}
    return HttpClient(server.http_url).generate(PARIS, **body)["text_output"]


def run(name: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    interpreter = ["bash"] if name.endswith(".sh") else [sys.executable]
    command = [*interpreter, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_grpc_stream(server, continuation):
    assert run("grpc_stream.py", PARIS, "--url", server.grpc_url, "--max-tokens", "32").stdout == continuation + "\n"


def test_http_stream(server, continuation):
    assert run("http_stream.py", PARIS, "--url", server.http_url, "--max-tokens", "32").stdout == continuation + "\n"


@pytest.mark.parametrize("name", ["grpc_stream.py", "http_stream.py"])
def test_what_the_server_refuses_is_said(server, name):
    url = server.grpc_url if name.startswith("grpc") else server.http_url
    done = run(name, PARIS, "--url", url, "--max-tokens", "0", code=1)
    assert "'max_tokens' is 0; allowed is" in done.stderr


def test_curl_stream(server, continuation):
    lines = run("curl_stream.sh", "--url", server.http_url, "--model", "llm", PARIS).stdout.split("\n\n")
    pieces = [json.loads(line.removeprefix("data: "))["text_output"] for line in lines if line.strip()]
    assert "".join(pieces) == continuation
    assert len(pieces) > 4


def test_curl_stream_escapes_the_prompt(server):
    assert "data: " in run("curl_stream.sh", "--url", server.http_url, 'Say "hi" with a \\ and\na new line').stdout


def test_async_cancel(server, continuation):
    done = run("async_cancel.py", PARIS, "--url", server.grpc_url, "--pieces", "5")
    text, last = done.stdout.rstrip("\n").rsplit("\n", 1)
    assert last == "cancelled after 5 pieces"
    assert continuation.startswith(text)
    assert _is_idle_soon(server), "1000 tokens take the worker much longer"


def _is_idle_soon(server: RunningServer) -> bool:
    """Whether the worker stops computing within five seconds."""
    worker = psutil.Process(server.worker_pids[0])
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        before = sum(worker.cpu_times()[:2])
        time.sleep(0.3)
        if sum(worker.cpu_times()[:2]) - before < 0.05:
            return True
    return False


def test_many_requests(server, continuation, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PARIS}\nWater boils at\n{PARIS}\n")
    arguments = ["--url", server.grpc_url, "--file", str(file), "--concurrency", "2", "--max-tokens", "32"]
    done = run("many_requests.py", *arguments)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == [PARIS, "Water boils at", PARIS]
    assert lines[0]["answer"] == lines[2]["answer"] == continuation
    assert re.fullmatch(r"3 answers, \d+ tokens in [\d.]+ s: \d+ tokens/s\n", done.stderr)


def test_the_list_of_examples_is_complete():
    listed = set(re.findall(r"^\| \[([\w.]+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
