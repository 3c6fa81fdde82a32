"""Random requests through a scheduler and a runner in this process, without a router."""

from __future__ import annotations

import random

import numpy as np

from backend_lib.arena import logprob_row
from backend_lib.config import Settings
from backend_lib.worker.logit_rules import LogitRules
from backend_lib.worker.machine import Machine
from backend_lib.worker.scheduler import Scheduler
from backend_lib.worker.sequence import Sequence


def serve(
    machine: Machine, settings: Settings, max_position: int, *, count: int, seed: int, special: float
) -> list[list[int]]:
    """Output ids of random requests. A step is launched before the one before it has ended.

    `special`: about which part of them asks for rules or log-probabilities.
    """
    rng = random.Random(seed)
    scheduler = Scheduler(
        kv_tokens=machine.kv_tokens, max_running=settings.max_running, max_model_len=max_position,
        prefill_chunk=settings.prefill_chunk,
    )  # fmt: skip
    sequences = [sequence(rng, slot, max_position // 3, special) for slot in range(count)]
    waiting = list(sequences)
    previous = None
    while waiting or not scheduler.idle or previous:
        if waiting and rng.random() < 0.5:
            scheduler.add(waiting.pop())
        plan = scheduler.plan()
        step = machine.runner.launch(plan) if plan.chunks else None
        if previous:
            tokens = previous.finalize().token_ids
            for each, token in zip(previous.sampled, tokens, strict=True):
                if not each.finish:
                    each.accept(token)
            scheduler.finalize(previous.plan)
        if step:
            step.sample()
        previous = step
    return [each.output_ids[: each.output_len].tolist() for each in sequences]


def sequence(rng: random.Random, slot: int, longest: int, special: float) -> Sequence:
    length = rng.choice([1, 2, 5, rng.randint(1, longest // 10 + 1), rng.randint(1, longest)])
    max_tokens = rng.randint(1, 6)
    rules = {
        "repetition_penalty": 1.1, "logit_bias": [[token, 0.5] for token in range(rng.randint(1, 40))],
        "bad_words": [[token] for token in range(rng.randint(1, 5))], "allowed_token_ids": [0, 1, 2],
    }  # fmt: skip
    rules = {name: value for name, value in rules.items() if rng.random() < 0.5}
    rows = {"logprobs": max_tokens, "prompt_logprobs": length}
    return Sequence(
        slot=slot, generation=0, prompt_ids=np.array([rng.randrange(99) for _ in range(length)], dtype=np.int32),
        output_ids=np.zeros(max_tokens, dtype=np.int32), max_tokens=max_tokens,
        temperature=rng.choice([0.0, 1.0]), seed=rng.getrandbits(64), top_k=rng.choice([0, 1, 7]),
        top_p=rng.choice([1.0, 0.9]), min_p=rng.choice([0.0, 0.1]),
        rules=LogitRules.from_blob(rules) if rng.random() < special else None,
        **{name: np.zeros(number, dtype=logprob_row(rng.randint(1, 4)))
           for name, number in rows.items() if rng.random() < special / 2},
    )  # fmt: skip
