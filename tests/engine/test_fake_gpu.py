"""Workers of models in their real size on a GPU that is not there: where tensors are, and what is compiled when."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from backend_lib.arena import logprob_row
from backend_lib.checkpoint import DecoderConfig, ExpertsConfig, LayerConfig, RopeConfig
from backend_lib.config import Settings
from backend_lib.worker.logit_rules import LogitRules
from backend_lib.worker.machine import Machine
from backend_lib.worker.scheduler import Scheduler
from backend_lib.worker.sequence import Sequence
from tests.support.fake_gpu import FakeGpu

_ROPE = RopeConfig(dim=128, theta=10000.0)
_SIZES: dict = {
    "architecture": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "layers": (LayerConfig(rope=_ROPE),), "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
    "max_position": 8192,
}  # fmt: skip
_MIXTURE = {
    "layers": (LayerConfig(rope=_ROPE, has_experts=True),), "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4,
    "experts": ExpertsConfig(count=128, used=8, intermediate_size=768), "head_norms": True, "vocab_size": 151936,
}  # fmt: skip
_WINDOWS = {
    "layers": (LayerConfig(rope=_ROPE, window=1000), LayerConfig(rope=None)), "attention_softcap": 50.0,
    "logit_softcap": 30.0, "post_norms": True, "embedding_scale": 48.0, "vocab_size": 100001, "qkv_bias": True,
    "tie_word_embeddings": True, "activation": "gelu_pytorch_tanh",
}  # fmt: skip
MODELS = {"llama": {}, "mixture": _MIXTURE, "windows": _WINDOWS}


def serve(machine: Machine, settings: Settings, max_position: int, *, count: int, seed: int) -> None:
    """Random requests through scheduler and runner, a step launched before the one before it has ended."""
    rng = random.Random(seed)
    scheduler = Scheduler(
        kv_tokens=machine.kv_tokens, max_running=settings.max_running, max_model_len=max_position,
        prefill_chunk=settings.prefill_chunk,
    )  # fmt: skip
    waiting = [sequence(rng, slot) for slot in range(count)]
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


def sequence(rng: random.Random, slot: int) -> Sequence:
    length, max_tokens = rng.choice([1, 2, 5, rng.randint(1, 300), rng.randint(1, 3000)]), rng.randint(1, 6)
    rules = {
        "repetition_penalty": 1.1, "logit_bias": [[token, 0.5] for token in range(rng.randint(1, 40))],
        "bad_words": [[token] for token in range(rng.randint(1, 5))], "allowed_token_ids": [0, 1, 2],
    }  # fmt: skip
    rules = {name: value for name, value in rules.items() if rng.random() < 0.5}
    rows = {"logprobs": max_tokens, "prompt_logprobs": length}
    return Sequence(
        slot=slot, generation=0, prompt_ids=np.array([rng.randrange(99) for _ in range(length)], dtype=np.int32),
        output_ids=np.zeros(max_tokens, dtype=np.int32), max_tokens=max_tokens,
        temperature=rng.choice([0.0, 1.0]), top_k=rng.choice([0, 1, 7]), top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.1]), rules=LogitRules.from_blob(rules) if rng.random() < 0.4 else None,
        **{name: np.zeros(number, dtype=logprob_row(rng.randint(1, 4)))
           for name, number in rows.items() if rng.random() < 0.3},
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.long) for name in ("llama", "mixture")] + ["windows"]
)
def test_nothing_is_compiled_while_serving(model: str, dtype: torch.dtype) -> None:
    """Nor does anything on the GPU meet the host's memory, or wait."""
    config = DecoderConfig(**_SIZES | MODELS[model])
    settings = Settings(model="", max_running=9, prefill_chunk=2048, kv_tokens=5000, max_model_len=config.max_position)
    gpu = FakeGpu()
    with gpu.present():
        machine = gpu.machine(config, settings, dtype)
        warm = set(gpu.launches)
        gpu.launches.clear()
        serve(machine, settings, config.max_position, count=30, seed=0)
    assert len(gpu.launches) > 500
    assert {launch for launch in gpu.launches if launch not in warm} == set()
