"""NVIDIA's perf_analyzer with client_examples/perf_analyzer_input.json, as docs/benchmarking.md says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INPUT = ROOT / "client_examples" / "perf_analyzer_input.json"


@pytest.fixture(scope="module")
def requests(server, tmp_path_factory) -> list[dict[str, Any]]:
    """What the documented command exports: every request with its responses."""
    file = tmp_path_factory.mktemp("perf_analyzer") / "profile.json"
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    (command,) = re.findall(r"^    (python -m benchmarks\.perf_analyzer (?:.*\\\n)*.*)", page, re.MULTILINE)
    words = {"python": sys.executable, "localhost:8001": server.grpc_url, "profile.json": str(file)}
    arguments = [words.get(word, word) for word in shlex.split(command.replace("\\\n", " "))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (experiment,) = json.loads(file.read_text())["experiments"]
    return experiment["requests"]


def test_every_request_is_answered(requests):
    assert len(requests) == 20
    prompts = {line["text_input"][0] for line in json.loads(INPUT.read_text())["data"]}
    assert {request["request_inputs"]["text_input"] for request in requests} == prompts


def test_tokens_are_counted_right(requests):
    for request in requests:
        asked = json.loads(request["request_inputs"]["sampling_parameters"])["max_tokens"]
        assert sum(answer["num_output_tokens"] for answer in request["response_outputs"]) == asked
        assert len({answer["num_input_tokens"] for answer in request["response_outputs"]}) == 1


def test_every_response_brings_tokens_and_the_last_one_says_why_it_ends(requests):
    """A final response without data would be one more timestamp: it would lengthen the latency."""
    for request in requests:
        answers = request["response_outputs"]
        assert len(answers) == len(request["response_timestamps"])
        assert all(answer["num_output_tokens"] > 0 for answer in answers)
        assert [answer["finish_reason"] for answer in answers] == ["None"] * (len(answers) - 1) + ["length"]


def test_answers_to_a_prompt_are_always_the_same(requests):
    texts: dict[str, set[str]] = {}
    for request in requests:
        text = "".join(answer["text_output"] for answer in request["response_outputs"])
        texts.setdefault(request["request_inputs"]["text_input"], set()).add(text)
    assert all(len(same) == 1 for same in texts.values()), texts
    assert any(text.startswith(" Paris") for text in texts["The capital of France is"])
