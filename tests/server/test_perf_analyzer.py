"""NVIDIA's perf_analyzer with client_examples/perf_analyzer_input.json, as docs/benchmarking.md says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backend_lib.checkpoint import open_checkpoint

ROOT = Path(__file__).parents[2]
INPUT = ROOT / "client_examples" / "perf_analyzer_input.json"


def documented(start: str) -> list[str]:
    """The commands of docs/benchmarking.md that begin with a pattern."""
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    return re.findall(rf"^    ({start}(?:.*\\\n)*.*)", page, re.MULTILINE)


def run(command: str) -> str:
    """What a command of the page prints; its `python` is the one that runs the tests."""
    command = re.sub(r"^python ", f"{sys.executable} ", command)
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=600, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def requests(server, tmp_path_factory) -> list[dict[str, Any]]:
    """What the documented command exports: every request with its responses."""
    file = tmp_path_factory.mktemp("perf_analyzer") / "profile.json"
    (command,) = documented(r"python -m benchmarks\.perf_analyzer -- -m")
    run(command.replace("localhost:8001", server.grpc_url).replace("profile.json", str(file)))
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


@pytest.mark.long
def test_genai_perf(server, tmp_path):
    """The documented commands; the tokenizer is a folder, so that nothing is looked up on the hub."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = open_checkpoint("smollm2").tokenizer
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "tokenizer")
    ready, environment, install, profile = documented(r"(?:\S*python \S+ \S+ -- --version|\S+ -m venv|\S+/pip|PATH=)")
    for command in (ready, environment, install):
        run(command)
    words = {
        "localhost:8001": server.grpc_url,
        "HuggingFaceTB/SmolLM2-135M-Instruct": str(tmp_path / "tokenizer"),
        "--artifact-dir artifacts": f"--artifact-dir {tmp_path}",
    }
    for word, value in words.items():
        profile = profile.replace(word, value)
    run(profile)
    (file,) = tmp_path.rglob("*_genai_perf.json")
    figures = json.loads(file.read_text())
    assert figures["request_count"]["avg"] == 8
    assert figures["input_sequence_length"]["avg"] == 64
    assert 14 <= figures["output_sequence_length"]["avg"] <= 17
    assert 0 < figures["time_to_first_token"]["avg"] < figures["request_latency"]["avg"]
