"""Penalties, biases, bans and allowed tokens through router and worker, against a loop over `transformers`."""

from __future__ import annotations

import json
import math
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.checkpoints import make_tiny_llama, tiny_tokenizer
from tests.support.engine import Ask, assert_level, running_router, wait_until, worker_pid

PROMPTS = ["the rain in the north", "one", "that sailor was not on that ship, and the others were"]
NUM_TOKENS = 40
ALLOWED = list(range(20, 60))
RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.2},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.4, "repetition_penalty": 0.9, "logit_bias": {"40": 1.5, "41": -100}},
    {"allowed_token_ids": ALLOWED},
    {"allowed_token_ids": ALLOWED, "presence_penalty": 2.0, "logit_bias": {"30": 2, "70": 50}},
    {"min_tokens": NUM_TOKENS, "stop_token_ids": ALLOWED, "ignore_eos": False},
    {},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@torch.inference_mode()
def expected_ids(model: PreTrainedModel, prompt_ids: list[int], rules: dict[str, Any]) -> list[int]:
    """The best token after vLLM's changes to the logits, one after the other."""
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = model(torch.tensor([prompt_ids + output])).logits[0, -1]
        scores = {token: float(logit) for token, logit in enumerate(logits)}
        scores = {token: score for token, score in scores.items() if token in rules.get("allowed_token_ids", scores)}
        for token in [
            *rules.get("stop_token_ids", []),
            *([model.config.eos_token_id] if "min_tokens" in rules else []),
        ]:
            scores.pop(token, None)
        counts = Counter(output)
        for token, score in scores.items():
            score += rules.get("logit_bias", {}).get(str(token), 0)
            if token in counts or token in prompt_ids:
                factor = rules.get("repetition_penalty", 1)
                score = score / factor if score > 0 else score * factor
            score -= rules.get("frequency_penalty", 0) * counts[token]
            scores[token] = score - rules.get("presence_penalty", 0) * (token in counts)
        output.append(max(scores, key=lambda token: scores[token]))
    return output


def asks() -> list[tuple[Ask, dict[str, Any]]]:
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "exclude_input_in_output": True, "stream": True}
    return [(Ask([], fields | rules, text=prompt), rules) for prompt in PROMPTS for rules in RULES]


def check(asked: list[tuple[Ask, dict[str, Any]]], reference: PreTrainedModel) -> None:
    tokenizer = tiny_tokenizer()
    for ask, rules in asked:
        sender = ask.sender.wait(60)
        assert sender.error is None, sender.error
        prompt_ids = tokenizer.encode(ask.text).ids
        output = expected_ids(reference, prompt_ids, rules)
        expected = tokenizer.decode(prompt_ids + output)[len(tokenizer.decode(prompt_ids)) :]
        assert sender.text == expected, rules


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_rules_beside_each_other(folder, reference, overlap: str) -> None:
    """In little memory: what is paused begins its counters anew from what it has produced."""
    asked = asks()
    settings = {"weights": "fp32", "prefill_chunk": 7, "kv_tokens": 400, "max_running": 16}
    with running_router(folder, overlap=overlap, **settings) as router:
        for ask, _ in asked:
            router.submit(ask.inbound())
        check(asked, reference)
        assert router._arena.status(0, 0).load.pauses > 0
        assert_level(router)


def test_rules_go_on_in_another_worker(folder, reference) -> None:
    asked = asks()
    with running_router(folder, weights="fp32", max_running=32) as router:
        for ask, _ in asked:
            router.submit(ask.inbound())
        wait_until(lambda: sum(ask.sender.num_tokens for ask, _ in asked) > len(asked) * NUM_TOKENS / 4)
        os.kill(worker_pid(router), signal.SIGKILL)
        check(asked, reference)
        assert router._arena.epoch(0) == 1
        assert_level(router)


def told(asked: Ask) -> tuple[list[int], list[dict[str, Any]], list[dict[str, Any] | None], float]:
    """Token ids, log-probabilities, those of the prompt, and their sum, from all responses of one request."""
    replies = [reply.tokens for reply in asked.sender.wait(60).replies]
    ids = [token_id for tokens in replies for token_id in tokens.token_ids]
    rows = [row for tokens in replies for row in json.loads(tokens.logprobs) or []]
    return ids, rows, json.loads(replies[0].prompt_logprobs), replies[-1].cumulative_logprob


def is_row_of(row: dict[str, Any], logprobs: torch.Tensor, token_id: int, count: int) -> bool:
    """The token itself first, and then the likeliest; equals within rounding may change places."""
    best = logprobs.topk(count)
    expected = {token_id: logprobs[token_id].item()} | dict(
        zip(best.indices.tolist(), best.values.tolist(), strict=True)
    )
    rank = int((logprobs >= logprobs[token_id]).sum())
    entry = row[str(token_id)]
    assert next(iter(row)) == str(token_id) and entry["rank"] == rank
    assert entry["decoded_token"] == tiny_tokenizer().decode([token_id], skip_special_tokens=False)
    return {int(key) for key in row} == set(expected) and all(
        math.isclose(each["logprob"], expected[int(key)], abs_tol=1e-4) for key, each in row.items()
    )


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_logprobs_are_those_of_transformers(folder, reference, overlap: str) -> None:
    """Of output and prompt, in pieces of the prompt, after a worker's death and with penalties, which do not show."""
    fields = {
        "max_tokens": 60, "ignore_eos": True, "stream": True, "return_logprobs": True, "return_output_ids": True,
        "return_cumulative_logprob": True, "return_prompt_logprobs": True, "presence_penalty": 0.5,
    }  # fmt: skip
    asked = [
        Ask([], fields | {"logprobs": count, "prompt_logprobs": 2, "temperature": 1.0, "seed": count}, text=prompt)
        for count, prompt in enumerate(PROMPTS)
    ]
    with running_router(folder, weights="fp32", prefill_chunk=5, overlap=overlap) as router:
        for ask in asked:
            router.submit(ask.inbound())
        wait_until(lambda: all(ask.sender.num_tokens > 5 for ask in asked))
        os.kill(worker_pid(router), signal.SIGKILL)
        answers = [told(ask) for ask in asked]
        assert_level(router)
    for count, (ask, (ids, rows, prompt_rows, total)) in enumerate(zip(asked, answers, strict=True)):
        prompt_ids = tiny_tokenizer().encode(ask.text).ids
        with torch.inference_mode():
            logprobs = reference(torch.tensor([prompt_ids + ids])).logits[0].log_softmax(-1)
        assert len(ids) == len(rows) == 60 and len(prompt_rows) == len(prompt_ids) and prompt_rows[0] is None
        for place, row in enumerate(prompt_rows[1:], start=1):
            assert is_row_of(row, logprobs[place - 1], prompt_ids[place], 2)
        for place, row in enumerate(rows, start=len(prompt_ids)):
            assert is_row_of(row, logprobs[place - 1], ids[place - len(prompt_ids)], count)
        chosen = [
            logprobs[place - 1, ids[place - len(prompt_ids)]].item() for place in range(len(prompt_ids), len(logprobs))
        ]
        assert math.isclose(total, sum(chosen), abs_tol=1e-2)
