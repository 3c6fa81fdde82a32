"""Steps before the first request, so that nothing is done for the first time when one waits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from backend_lib.arena import logprob_row
from backend_lib.config import PROMPT_LOGPROBS_PER_STEP
from backend_lib.worker.logit_rules import LogitRules
from backend_lib.worker.runner import Runner
from backend_lib.worker.scheduler import Chunk, Plan
from backend_lib.worker.sequence import Sequence

# One of everything that a request may ask of the sampler.
RULES = {"repetition_penalty": 1.1, "logit_bias": [[1, 0.5]], "bad_words": [[1]], "allowed_token_ids": [0, 1]}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 2, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "rules": RULES, "logprobs": 2},
    {"prompt_logprobs": 2},
)


def warm_up(runner: Runner, lengths: list[int], *, everything: bool) -> float:
    """Run prompts of these lengths, and decode steps between them, on the spare row.

    `everything`: with all that may be asked of the sampler, because each of its kernels is compiled when first used.

    Returns the seconds that a token of the last prompt took.
    """
    seconds = 0.0
    for length in lengths:
        for kind in KINDS if everything else KINDS[:1]:
            if "prompt_logprobs" in kind and length > PROMPT_LOGPROBS_PER_STEP:
                continue
            sequence = _sequence(runner.spare_row, length, **kind)
            started = time.perf_counter()
            _run(runner, sequence, Chunk(sequence, 0, length, True), num_decodes=0)
            seconds = time.perf_counter() - started
            _run(runner, sequence, Chunk(sequence, length, 1, True), num_decodes=1)
    last = _sequence(runner.spare_row, 1)  # leaves the row greedy, as padding is to be
    _run(runner, last, Chunk(last, 0, 1, True), num_decodes=0)
    return seconds / lengths[-1]


def _sequence(row: int, length: int, *, rules: dict | None = None, **kind: Any) -> Sequence:
    records: dict[str, Any] = {
        name: np.zeros(max(length, 2), dtype=logprob_row(kind.pop(name)))
        for name in ("logprobs", "prompt_logprobs")
        if name in kind
    }
    sequence = Sequence(
        slot=-1, generation=0, prompt_ids=np.zeros(length, dtype=np.int32), output_ids=np.zeros(2, dtype=np.int32),
        max_tokens=2, rules=LogitRules.from_blob(rules or {}), **records, **kind,
    )  # fmt: skip
    sequence.row = row
    return sequence


def _run(runner: Runner, sequence: Sequence, chunk: Chunk, *, num_decodes: int) -> None:
    positions = np.arange(chunk.start, chunk.start + chunk.length)
    plan = Plan(
        step=-1, chunks=[chunk], num_decodes=num_decodes, rows=np.full(chunk.length, sequence.row),
        positions=positions, kv_index=np.full(chunk.length, runner.spare_index),
        started=[] if num_decodes else [sequence],
    )  # fmt: skip
    step = runner.launch(plan)
    step.sample()
    sequence.output_len += len(step.finalize().token_ids)
