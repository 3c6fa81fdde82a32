"""The families' random checkpoints as GGUF, written by llama.cpp's conventions."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.support.checkpoints import make_tiny_gguf

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}
_PERMUTED = ("llama", "smollm3")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def convert(folder: Path, path: Path, **overrides: Any) -> Path:
    """A folder of `make_variant` as a GGUF file. `overrides` are metadata, `__` for a dot."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["architectures"][0]]
    tensors = _tensors(folder, arch, config) | _rope_tensors(config)
    metadata = {f"{arch}.{key}": value for key, value in _metadata(config, arch).items()}
    return make_tiny_gguf(path, tensors, arch=arch, metadata=metadata, **overrides)


def _tensors(folder: Path, arch: str, config: dict[str, Any]) -> dict[str, np.ndarray]:
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    tensors = {}
    for name, values in _stacked(load_file(folder / "model.safetensors")).items():
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name, name
        tensors[new_name] = _converted(new_name, values, arch, config)
    return tensors


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The experts' tensors as one, under the name that the gguf package knows."""
    whole = {name: values for name, values in tensors.items() if not _EXPERT.fullmatch(name)}
    parts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if match := _EXPERT.fullmatch(name):
            parts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
    return whole | {name: np.stack([each[i] for i in range(len(each))]) for name, each in parts.items()}


def _converted(name: str, values: np.ndarray, arch: str, config: dict[str, Any]) -> np.ndarray:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads and arch in _PERMUTED:
        return permuted(values, heads)
    return values + 1 if "norm" in name and arch.startswith("gemma") else values


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter writes q and k: the halves of each head interleaved."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The object that is stretched: Gemma 3's of the full layers."""
    return config["rope_parameters"].get("full_attention", config["rope_parameters"])


def _rope_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rope = _rope(config)
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{each}.weight": np.float32(rope[f"{each}_factor"]) for each in ("long", "short")}
    if rope["rope_type"] == "llama3":
        return {"rope_freqs.weight": _llama3_factors(rope, config["head_dim"])}
    return {}


def _llama3_factors(rope: dict[str, Any], dim: int) -> np.ndarray:
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = _rope(config)
    values = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "attention.sliding_window": config.get("sliding_window") or 0,
    }
    return values | _scaling(config, rope) | _own(config, arch)


def _scaling(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        scaling = {"rope.scaling.type": kind, "rope.scaling.factor": rope["factor"]}
        original = rope.get("original_max_position_embeddings")
        return scaling | ({"rope.scaling.original_context_length": original} if original else {})
    if kind == "longrope":
        original = config["original_max_position_embeddings"]
        return {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(rope["factor"]) / math.log(original)),
        }
    return {}


def _own(config: dict[str, Any], arch: str) -> dict[str, Any]:
    if arch == "gemma2":
        return {
            "attn_logit_softcapping": config["attn_logit_softcapping"],
            "final_logit_softcapping": config["final_logit_softcapping"],
        }
    if arch == "gemma3":
        return {"rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"]}
    if "num_local_experts" in config:
        inner = config.get("moe_intermediate_size", config["intermediate_size"])
        return {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": inner,
        }
    return {}
