"""Penalties, biases, bans and allowed tokens through router and worker, against a loop over `transformers`."""

from __future__ import annotations

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
