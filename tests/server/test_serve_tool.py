"""`benchmarks/serve.py` against a real server with the test-only model, in every way that its page in docs/ shows."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import hash_text

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarking.md").read_text()
COMMANDS = re.findall(r"^    (python benchmarks/serve\.py .*)$", PAGE, re.MULTILINE)
REQUESTS = "\n".join(
    line.strip() for line in re.findall(r'^    \{"(?:text_input|prompt_tokens)".*$', PAGE, re.MULTILINE)
)


class Tool:
    """The program, with its files in one folder and words that the test-only model knows."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        words = folder / "words.txt"
        words.write_text(" ".join(hash_text([i]) for i in range(3, 1000)))
        self._options = ["--url", url, "--words", str(words)]

    def run(self, *arguments: str, code: int = 0, module: bool = False) -> subprocess.CompletedProcess[str]:
        program = ["-m", "benchmarks.serve"] if module else ["benchmarks/serve.py"]
        command = [sys.executable, *program, *arguments, *self._options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def levels(self, *arguments: str, code: int = 0, module: bool = False) -> list[dict[str, Any]]:
        """The figures of each level."""
        file = self.folder / "load.json"
        self.run(*arguments, "--json", str(file), code=code, module=module)
        return json.loads(file.read_text())["levels"]

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)


@pytest.fixture
def tool(hash_server, tmp_path) -> Tool:
    return Tool(hash_server.grpc_url, tmp_path)


@pytest.mark.parametrize("module", [False, True], ids=["file", "module"])
def test_closed_loop(tool, module):
    arguments = ["--concurrency", "1", "4", "--requests", "8", "--input-tokens", "20", "--output-tokens", "30"]
    for level in tool.levels(*arguments, module=module):
        assert (level["requests"], level["failed"], level["errors"]) == (8, 0, {})
        assert (level["mean_input_tokens"], level["mean_output_tokens"]) == (20, 30)
        assert level["output_tokens_per_s"] == pytest.approx(8 * 30 / level["seconds"])
        assert level["total_tokens_per_s"] == pytest.approx(8 * 50 / level["seconds"])
        assert level["requests_per_s"] == pytest.approx(8 / level["seconds"])
        assert 0 < level["ttft_ms"]["p50"] < level["end_to_end_ms"]["p50"] < 1000 * level["seconds"]
        assert 0 <= level["inter_token_ms"]["p50"] <= level["inter_token_ms"]["p99"]
        assert level["client_cpu"] > 0


def test_open_loop(tool):
    (level,) = tool.levels("--rate", "50", "--duration", "1.5", "--output-tokens", "4:8", "--input-tokens", "8:16")
    assert 40 < level["requests"] < 115
    assert level["failed"] == 0
    assert 8 < level["mean_input_tokens"] < 16
    assert 4 < level["mean_output_tokens"] < 8
    assert level["seconds"] == 1.5


def test_open_loop_never_has_more_outstanding_than_allowed(tool):
    arguments = ["--rate", "inf", "--requests", "10", "--max-outstanding", "1", "--output-tokens", "20"]
    (level,) = tool.levels(*arguments)
    # One after the other: the last is sent when all but it have been answered.
    assert level["send_delay_ms"]["p99"] > 7 * level["end_to_end_ms"]["p50"] * 0.5


def test_a_request_file(tool):
    lines = [
        {"text_input": hash_text([5, 6, 7]), "max_tokens": 3},
        {"prompt_tokens": 5, "max_tokens": 5, "temperature": 0.5},
        {"prompt_tokens": 10},
    ]
    file = tool.write("requests.jsonl", "\n".join(map(json.dumps, lines)))
    (level,) = tool.levels("--request-file", file, "--requests", "6", "--concurrency", "2", "--output-tokens", "13")
    assert (level["requests"], level["failed"]) == (6, 0)
    assert level["mean_input_tokens"] == (3 + 5 + 10) / 3
    assert level["mean_output_tokens"] == (3 + 5 + 13) / 3


def test_shared_prefixes(tool):
    arguments = ["--shared-prefix-tokens", "40", "--prefix-groups", "2", "--input-tokens", "10", "--output-tokens", "4"]
    (level,) = tool.levels(*arguments, "--concurrency", "2")
    assert (level["requests"], level["failed"], level["mean_input_tokens"]) == (8, 0, 50)


def test_errors_are_counted_by_message(tool):
    file = tool.write("requests.jsonl", '{"prompt_tokens": 3, "top_p": 7}\n{"prompt_tokens": 3, "max_tokens": 2}')
    done = tool.run("--request-file", file, "--concurrency", "2", "--requests", "6", "--warmup", "0")
    assert "concurrency 2: 3 failed: 'top_p' is 7; allowed is" in done.stderr
    assert done.stdout.splitlines()[1].split()[:3] == ["2", "6", "3"]


def test_a_level_without_an_answer_is_a_failure(tool):
    (level,) = tool.levels("--sampling", '{"top_p": 7}', "--concurrency", "2", "--warmup", "0", code=1)
    assert (level["requests"], level["failed"], level["ttft_ms"]) == (8, 8, None)


def test_a_server_that_is_not_there_is_said_at_once(tool):
    done = tool.run("--model", "nope", code=1)
    assert "the warm-up request failed: Request for unknown model: 'nope'" in done.stderr


def test_nothing_but_the_table_when_stderr_is_no_terminal(tool):
    done = tool.run("--concurrency", "1", "--requests", "1", "--output-tokens", "4")
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands(tool, command):
    tool.write("requests.jsonl", REQUESTS.replace("Write a story about a lighthouse.", hash_text([5, 6, 7])))
    words = {"60": "1", **{name: str(tool.folder / name) for name in ("requests.jsonl", "load.json", "load.png")}}
    tool.run(*(words.get(word, word) for word in shlex.split(command)[2:]))
    if "load.png" in command:
        assert (tool.folder / "load.png").read_bytes().startswith(b"\x89PNG")
        assert len(json.loads((tool.folder / "load.json").read_text())["levels"]) == 6


def test_the_page_shows_commands():
    assert len(COMMANDS) == 6
    assert len(REQUESTS.splitlines()) == 2
