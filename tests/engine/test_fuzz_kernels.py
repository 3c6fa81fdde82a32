"""Random requests to a worker on the GPU's kernels, in Triton's interpreter, beside one that computes in torch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_tiny_llama
from tests.support.engine import Ask, assert_level, running_router

WORDS = ["the", "rain", "in", "north", "one", "that", "sailor", "was", "not", "on", "ship", "and", "others", "were"]
FIELDS = {"stream": True, "return_output_ids": True, "return_logprobs": True, "return_prompt_logprobs": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


def ask(rng: random.Random, longest: int, max_tokens: int) -> Ask:
    text = " ".join(rng.choice(WORDS) for _ in range(rng.choice([1, rng.randint(1, 6), rng.randint(1, longest)])))
    return Ask([], FIELDS | {"max_tokens": rng.randint(1, max_tokens)} | fields(rng), text=text)


def fields(rng: random.Random) -> dict[str, Any]:
    some = {
        "top_k": rng.choice([1, 3, 40, 511, 512]), "top_p": rng.choice([0.01, 0.5, 0.95]),
        "min_p": rng.choice([0.02, 0.3, 1.0]), "repetition_penalty": rng.choice([0.7, 1.3]),
        "presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2),
        "logit_bias": {str(rng.randrange(512)): rng.choice([-100, -2, 1.5, 8]) for _ in range(rng.randint(1, 150))},
        "bad_words": rng.sample(WORDS, 2), "allowed_token_ids": rng.sample(range(512), rng.randint(1, 90)),
        "logprobs": rng.randint(0, 5), "prompt_logprobs": rng.randint(0, 3), "min_tokens": 2,
        "stop_token_ids": rng.sample(range(512), 60), "ignore_eos": True,
    }  # fmt: skip
    chosen = {name: value for name, value in some.items() if rng.random() < 0.25}
    chosen["min_tokens"] = min(chosen.get("min_tokens", 0), 1)
    if rng.random() < 0.6:
        chosen |= {"temperature": rng.choice([0.1, 1.0, 2.0]), "seed": rng.getrandbits(64)}
    if "allowed_token_ids" not in chosen and rng.random() < 0.2:
        grammars = {"guided_regex": "[a-z]{3,9}", "guided_choice": ["north", "not one"], "guided_json_object": True}
        name = rng.choice([*grammars])
        chosen = {key: chosen[key] for key in ("temperature", "seed", "logprobs", "top_k") if key in chosen}
        chosen[name] = grammars[name]
    return chosen


def settings(rng: random.Random, longest: int, dtype: str) -> dict[str, Any]:
    """Memory for little more than the longest, so that sequences pause; a word is some three tokens."""
    return {
        "max_running": rng.randint(1, 8), "prefill_chunk": rng.randint(1, 32), "overlap": rng.choice(["on", "off"]),
        "kv_tokens": 4 * longest + rng.choice([20, 60, 300]), "dtype": dtype, "debug": "on",
    }  # fmt: skip


def told(ask: Ask, timeout: float) -> tuple[list[int], list, list]:
    """Token ids, and log-probabilities of output and prompt: of one who has gone away, what came before."""
    sender = ask.sender.wait(timeout)
    assert not sender.faults and (sender.error is None or sender.cancelled), (ask, sender.error, sender.faults)
    tokens = [reply.tokens for reply in sender.replies if reply.tokens]
    ids = [token_id for each in tokens for token_id in each.token_ids]
    rows = [row for each in tokens for row in json.loads(each.logprobs) or []]
    return ids, rows, json.loads(tokens[0].prompt_logprobs) or [] if tokens else []


def check(ask: Ask, found: tuple, expected: tuple, tolerance: float) -> None:
    """In 16 bits one token in many is another, and all after it; log-probabilities up to there are about the same."""
    (ids, rows, prompt), (expected_ids, expected_rows, expected_prompt) = found, expected
    length = len(expected_ids)
    if ask.sender.cancelled:
        length = min(len(ids), length)
    elif tolerance > 1e-3:
        pairs = zip(ids, expected_ids, strict=False)
        length = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ids), length))
    else:
        assert len(ids) == length, ask
    assert ids[:length] == expected_ids[:length], ask
    close_rows(rows[:length], expected_rows[:length], tolerance)
    if ids or not ask.sender.cancelled:
        close_rows(prompt, expected_prompt, tolerance)


def close_rows(rows: list, expected: list, tolerance: float) -> None:
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        both = set(row or ()) & set(other or ())
        assert (row is None) == (other is None) and (not row or both)
        for token in both:
            assert row[token]["logprob"] == pytest.approx(other[token]["logprob"], abs=tolerance)


def run(folder: Path, seed: int, *, count: int, longest: int, max_tokens: int, dtype: str) -> None:
    def asks() -> list[Ask]:
        rng = random.Random(seed)
        return [ask(rng, longest, max_tokens) for _ in range(count)]

    rng = random.Random(seed + 1000)
    expected = []
    with running_router(folder, device="cpu", weights="fp32") as router:
        for each in (asked := asks()):
            router.submit(each.inbound())
        expected = [told(each, 60) for each in asked]
    with running_router(folder, device="interpret", **settings(rng, longest, dtype)) as router:
        for each in (asked := asks()):
            router.submit(each.inbound())
        for each in asked:
            each.sender.cancelled = rng.random() < 0.15
        found = [told(each, 200) for each in asked]
        assert_level(router)
    for each, ours, theirs in zip(asked, found, expected, strict=True):
        check(each, ours, theirs, 1e-4 if dtype == "float32" else 0.1)


def test_the_same_answers(folder: Path) -> None:
    run(folder, 1, count=6, longest=8, max_tokens=4, dtype="float32")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_many(folder: Path, dtype: str, seed: int) -> None:
    run(folder, 10 + seed, count=12, longest=25, max_tokens=8, dtype=dtype)
