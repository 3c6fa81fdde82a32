"""A real worker on the GPU's kernels, in Triton's interpreter, gives the tokens of the worker that computes in torch.

Launches are checked to wait for nothing (`debug: on`), decode rows are filled up as for graphs, and memory is short, so
that sequences wait for one another.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_tiny_llama
from tests.support.engine import Ask, assert_level, running_router, wait_until, worker_pid

PROMPTS = ["the rain in the north", "one", "that sailor was not on that ship, and the others were"]
NUM_TOKENS = 12
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 7, "top_p": 0.8},
    {"temperature": 0.9, "seed": 3, "min_p": 0.05, "top_p": 0.9},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "logit_bias": {"40": 1.5, "41": -100}},
    {"allowed_token_ids": list(range(20, 60)), "presence_penalty": 2.0, "temperature": 1.0, "seed": 4},
    {"logprobs": 3, "prompt_logprobs": 2, "bad_words": ["the"]},
]
FIELDS = {
    "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "return_output_ids": True, "return_logprobs": True,
    "return_prompt_logprobs": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


def asks() -> list[Ask]:
    return [Ask([], FIELDS | kind, text=prompt) for kind, prompt in zip(KINDS, 3 * PROMPTS, strict=False)]


def answers(asked: list[Ask]) -> list[tuple[list[int], list, list]]:
    """Token ids, and log-probabilities of output and prompt."""
    found = []
    for ask in asked:
        sender = ask.sender.wait(100)
        assert sender.error is None, sender.error
        tokens = [reply.tokens for reply in sender.replies]
        rows = [row for each in tokens for row in json.loads(each.logprobs) or []]
        ids = [token_id for each in tokens for token_id in each.token_ids]
        found.append((ids, rows, json.loads(tokens[0].prompt_logprobs) or []))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[int], list, list]]:
    asked = asks()
    with running_router(folder, device="cpu", weights="fp32") as router:
        for ask in asked:
            router.submit(ask.inbound())
        return answers(asked)


def check(asked: list[Ask], expected: list[tuple[list[int], list, list]]) -> None:
    for (ids, *told), (expected_ids, *expected_told) in zip(answers(asked), expected, strict=True):
        assert ids == expected_ids and len(ids) == NUM_TOKENS
        for rows, expected_rows in zip(told, expected_told, strict=True):
            assert [row and _rounded(row) for row in rows] == [row and _rounded(row) for row in expected_rows]


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {token: (entry["rank"], pytest.approx(entry["logprob"], abs=1e-4)) for token, entry in row.items()}


@pytest.mark.parametrize("overlap", [pytest.param("off", marks=pytest.mark.long), "on"])
def test_the_same_tokens(folder: Path, expected, overlap: str) -> None:
    asked = asks()
    settings = {"max_running": 6, "prefill_chunk": 7, "kv_tokens": 90, "dtype": "float32", "debug": "on"}
    with running_router(folder, device="interpret", overlap=overlap, **settings) as router:
        for ask in asked:
            router.submit(ask.inbound())
        check(asked, expected)
        assert_level(router)


@pytest.mark.long
def test_another_worker_goes_on(folder: Path, expected) -> None:
    asked = asks()
    with running_router(folder, device="interpret", dtype="float32", max_running=8) as router:
        for ask in asked:
            router.submit(ask.inbound())
        wait_until(lambda: all(ask.sender.num_tokens > 2 for ask in asked), timeout=60)
        os.kill(worker_pid(router), signal.SIGKILL)
        check(asked, expected)
        assert router._arena.epoch(0) == 1
        assert_level(router)
