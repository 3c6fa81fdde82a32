"""Workers of models in their real size on a GPU that is not there: where tensors are, and what is compiled when."""

from __future__ import annotations

import pytest
import torch

from backend_lib.checkpoint import DecoderConfig, ExpertsConfig, LayerConfig, RopeConfig
from backend_lib.config import Settings
from tests.support.fake_gpu import FakeGpu, FakeRanks
from tests.support.requests import serve

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
        serve(machine, settings, config.max_position, count=30, seed=0, special=0.5)
    assert len(gpu.launches) > 500
    assert {launch for launch in gpu.launches if launch not in warm} == set()


@pytest.mark.parametrize(("rank", "size"), [(0, 3), pytest.param(2, 3, marks=pytest.mark.long)])
@pytest.mark.parametrize("model", ["windows", pytest.param("mixture", marks=pytest.mark.long)])
def test_nor_by_one_of_several_ranks(model: str, rank: int, size: int) -> None:
    """Three ranks have 3, 3 and 2 of 8 key-value heads, and 2, 1 and 1 of 4."""
    config = DecoderConfig(**_SIZES | MODELS[model])
    settings = Settings(model="", max_running=9, prefill_chunk=2048, kv_tokens=5000, max_model_len=config.max_position)
    gpu, ranks = FakeGpu(), FakeRanks(rank, size)
    with gpu.present():
        machine = gpu.machine(config, settings, torch.bfloat16, ranks)
        warm, sums = set(gpu.launches), ranks.sums
        gpu.launches.clear()
        serve(machine, settings, config.max_position, count=30, seed=0, special=0.5)
    assert len(gpu.launches) > 300 and ranks.sums > sums
    assert {launch for launch in gpu.launches if launch not in warm} == set()
