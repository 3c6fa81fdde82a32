"""A decoder's description from the metadata of a GGUF file.

What llama.cpp knows of an architecture without reading it from the file is known here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from backend_lib.checkpoint.decoder_config import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    RopeConfig,
    RopeScaling,
)
from backend_lib.checkpoint.fields import Fields

_SOFTMAX = 1  # llama.cpp's number for the router's gating function


class Metadata:
    """The keys of one architecture (`{arch}.` is left out of their names), and the tensors beside them."""

    def __init__(self, fields: Fields, tensors: Mapping[str, Any]) -> None:
        self.arch = fields.text("general.architecture")
        self.fields = fields
        self.tensors = tensors

    def has(self, key: str) -> bool:
        """Whether there is anything but 0 at `key`: converters write 0 for what a model does not have."""
        return bool(self.value(key))

    def value(self, key: str) -> Any:
        """None when absent."""
        return self.fields.values.get(f"{self.arch}.{key}")

    def whole(self, key: str, default: int | None = None) -> int:
        return self.fields.whole(f"{self.arch}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.fields.number(f"{self.arch}.{key}", default)

    def text(self, key: str, default: str) -> str:
        return self.fields.text(f"{self.arch}.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        return self.fields.flag(f"{self.arch}.{key}", default)

    def error(self, key: str, allowed: str) -> ValueError:
        return self.fields.error(f"{self.arch}.{key}", allowed)

    def refuse(self, *keys: str) -> None:
        """Options that would be computed wrongly without an error."""
        for key in keys:
            if self.has(key):
                raise self.error(key, "none")

    def factors(self, name: str) -> tuple[float, ...]:
        """A tensor of rotary divisors."""
        data = self.tensors[name].data if name in self.tensors else None
        if data is None or data.dtype.kind != "f" or data.ndim != 1 or len(data) > MAX_HEAD_DIM:
            raise ValueError(f"{self.fields.source}: tensor '{name}' must be a list of at most {MAX_HEAD_DIM} floats")
        return tuple(data.astype(float).tolist())

    @property
    def num_layers(self) -> int:
        return self.fields.whole(f"{self.arch}.block_count", high=MAX_LAYERS)

    @property
    def head_dim(self) -> int:
        return self.whole("attention.key_length", self.whole("embedding_length") // self.whole("attention.head_count"))


class _Family(NamedTuple):
    """An architecture: Hugging Face's name for it, its layers, and what else sets it apart."""

    name: str
    layers: Callable[[Metadata], tuple[LayerConfig, ...]]
    own: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}


def read_gguf_config(fields: Fields, tensors: Mapping[str, Any]) -> DecoderConfig:
    """`tensors` are the file's, by name. Raises ValueError naming what is missing or not supported."""
    metadata = Metadata(fields, tensors)
    if metadata.arch not in _FAMILIES:
        raise fields.error("general.architecture", ", ".join(f"'{name}'" for name in _FAMILIES))
    family = _FAMILIES[metadata.arch]
    num_heads = metadata.whole("attention.head_count")
    if metadata.whole("attention.value_length", metadata.head_dim) != metadata.head_dim:
        raise metadata.error("attention.value_length", f"{metadata.head_dim}, the size of a key")
    shared: dict[str, Any] = {
        "architecture": family.name,
        "vocab_size": metadata.whole("vocab_size", len(fields.strings("tokenizer.ggml.tokens"))),
        "hidden_size": metadata.whole("embedding_length"),
        "intermediate_size": metadata.whole("feed_forward_length", 1 if metadata.has("expert_count") else None),
        "layers": family.layers(metadata),
        "num_heads": num_heads,
        "num_kv_heads": metadata.whole("attention.head_count_kv", num_heads),
        "head_dim": metadata.head_dim,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position": _max_position(metadata),
        "experts": _experts(metadata),
        "tie_word_embeddings": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "attention_output_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    return DecoderConfig(**(shared | family.own(metadata)))


# Layers.


def _plain_layers(metadata: Metadata) -> tuple[LayerConfig, ...]:
    metadata.refuse("attention.sliding_window")
    return _equal_layers(metadata)


def _windowed_layers(metadata: Metadata) -> tuple[LayerConfig, ...]:
    window = metadata.whole("attention.sliding_window") if metadata.has("attention.sliding_window") else None
    return _equal_layers(metadata, window=window)


def _equal_layers(metadata: Metadata, window: int | None = None) -> tuple[LayerConfig, ...]:
    layer = LayerConfig(rope=_rope(metadata), window=window, has_experts=metadata.has("expert_count"))
    return (layer,) * metadata.num_layers


def _smollm3_layers(metadata: Metadata) -> tuple[LayerConfig, ...]:
    """Every fourth layer has no positions."""
    metadata.refuse("attention.sliding_window")
    rope = _rope(metadata)
    return tuple(LayerConfig(rope=rope if (i + 1) % 4 else None) for i in range(metadata.num_layers))


def _gemma2_layers(metadata: Metadata) -> tuple[LayerConfig, ...]:
    rope = _rope(metadata)
    windows = _windows(metadata, metadata.whole("attention.sliding_window", 4096), period=2)
    return tuple(LayerConfig(rope=rope, window=window) for window in windows)


def _gemma3_layers(metadata: Metadata) -> tuple[LayerConfig, ...]:
    """Layers with a window rotate by a base of their own, unscaled."""
    full = _rope(metadata)
    local = RopeConfig(dim=metadata.head_dim, theta=metadata.number("rope.freq_base_swa", 10000.0))
    window = metadata.whole("attention.sliding_window") if metadata.has("attention.sliding_window") else None
    windows = _windows(metadata, window, period=6)
    return tuple(LayerConfig(rope=full if window is None else local, window=window) for window in windows)


def _windows(metadata: Metadata, window: int | None, period: int) -> list[int | None]:
    """The last layer of each period looks at everything, unless the file says which do."""
    key = "attention.sliding_window_pattern"
    pattern = metadata.value(key)
    if isinstance(pattern, list):
        if len(pattern) != metadata.num_layers or not all(isinstance(each, bool) for each in pattern):
            raise metadata.error(key, f"a number, or {metadata.num_layers} of true and false")
        return [window if has_window else None for has_window in pattern]
    period = metadata.whole(key, period)
    return [window if (i + 1) % period else None for i in range(metadata.num_layers)]


# Rotary positions.


def _rope(metadata: Metadata) -> RopeConfig:
    dim = metadata.whole("rope.dimension_count", metadata.head_dim)
    if dim != metadata.head_dim and metadata.arch != "phi3":
        raise metadata.error("rope.dimension_count", f"{metadata.head_dim}, the size of a head")
    return RopeConfig(dim=dim, theta=metadata.number("rope.freq_base", 10000.0), scaling=_scaling(metadata))


def _scaling(metadata: Metadata) -> RopeScaling | None:
    key = "rope.scaling.type"
    kind = metadata.text(key, "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise metadata.error(key, "'none', 'linear', 'yarn', 'longrope'")
    if "rope_factors_long.weight" in metadata.tensors:
        return RopeScaling(
            kind="longrope",
            original_max_position=metadata.whole("rope.scaling.original_context_length"),
            attention_factor=metadata.number("rope.scaling.attn_factor", 1.0),
            factors=metadata.factors("rope_factors_short.weight"),
            long_factors=metadata.factors("rope_factors_long.weight"),
        )
    if "rope_freqs.weight" in metadata.tensors:  # converters work llama3 scaling out to a divisor for each frequency
        return RopeScaling(kind="factors", factors=metadata.factors("rope_freqs.weight"))
    if kind == "yarn":
        return _yarn(metadata)
    return RopeScaling(kind=kind, factor=metadata.number("rope.scaling.factor")) if kind == "linear" else None


def _yarn(metadata: Metadata) -> RopeScaling:
    metadata.refuse(*(f"rope.scaling.yarn_{each}" for each in ("log_multiplier", "ext_factor", "attn_factor")))
    factor = metadata.number("rope.scaling.factor")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=metadata.whole("rope.scaling.original_context_length", metadata.whole("context_length")),
        beta_fast=metadata.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=metadata.number("rope.scaling.attn_factor", 1.0) * (1.0 + 0.1 * math.log(max(factor, 1.0))),
    )


def _max_position(metadata: Metadata) -> int:
    """Tokens a sequence may have. Files with yarn give the length before it was applied, or after."""
    length = metadata.whole("context_length")
    if metadata.text("rope.scaling.type", "none") != "yarn":
        return length
    original = metadata.whole("rope.scaling.original_context_length", length)
    return max(length, int(original * metadata.number("rope.scaling.factor")))


# What families have of their own.


def _experts(metadata: Metadata) -> ExpertsConfig | None:
    if not metadata.has("expert_count"):
        return None
    metadata.refuse("expert_shared_count", "expert_weights_scale", "leading_dense_block_count")
    if metadata.whole("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise metadata.error("expert_gating_func", f"{_SOFTMAX} (softmax)")
    return ExpertsConfig(
        count=metadata.whole("expert_count"),
        used=metadata.whole("expert_used_count"),
        intermediate_size=metadata.whole("expert_feed_forward_length", metadata.whole("feed_forward_length", 1)),
        renormalised=metadata.flag("expert_weights_norm", True),
    )


def _head_norms(metadata: Metadata) -> dict[str, Any]:
    return {"head_norms": True}


def _fused(metadata: Metadata) -> dict[str, Any]:
    return {"fused_projections": True}


def _gemma(metadata: Metadata, *, layers_of_27b: int) -> dict[str, Any]:
    """Norms are written whole. The 27B models scale their scores by another size than that of a head."""
    head_dim = metadata.head_dim
    if metadata.num_layers == layers_of_27b:
        head_dim = metadata.whole("embedding_length") // metadata.whole("attention.head_count")
    caps = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    return {
        "activation": "gelu_pytorch_tanh",
        "attention_scale": head_dim**-0.5,
        "embedding_scale": metadata.whole("embedding_length") ** 0.5,
        "post_norms": True,
        **{name: metadata.number(key) for name, key in caps.items() if metadata.has(key)},
    }


_FAMILIES: dict[str, _Family] = {
    "gemma2": _Family("Gemma2ForCausalLM", _gemma2_layers, lambda metadata: _gemma(metadata, layers_of_27b=46)),
    "gemma3": _Family(
        "Gemma3ForCausalLM",
        _gemma3_layers,
        lambda metadata: _gemma(metadata, layers_of_27b=62) | _head_norms(metadata),
    ),
    "llama": _Family("LlamaForCausalLM", _windowed_layers),
    "phi3": _Family("Phi3ForCausalLM", _windowed_layers, _fused),
    "qwen2": _Family("Qwen2ForCausalLM", _plain_layers),
    "qwen3": _Family("Qwen3ForCausalLM", _plain_layers, _head_norms),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", _plain_layers, _head_norms),
    "smollm3": _Family("SmolLM3ForCausalLM", _smollm3_layers),
}
