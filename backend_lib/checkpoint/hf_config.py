"""A decoder's description from a Hugging Face config.json: what all families share, and what each does differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backend_lib.checkpoint.decoder_config import (
    ACTIVATIONS,
    MAX_LAYERS,
    DecoderConfig,
    ExpertsConfig,
    HashConfig,
    LayerConfig,
    RopeConfig,
)
from backend_lib.checkpoint.fields import Fields, source_named
from backend_lib.checkpoint.rope_fields import read_rope, rope_object, stretched_position
from backend_lib.checkpoint.untrusted import shown

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_config(fields: Fields) -> DecoderConfig | HashConfig:
    """Raises ValueError naming what is missing or not supported, the architecture first."""
    architectures = fields.values.get("architectures")
    read = _READERS.get(str(architectures[0])) if isinstance(architectures, list) and architectures else None
    if read is None:
        raise fields.error("architectures", ", ".join(f"['{name}']" for name in _READERS))
    if fields.values.get("quantization_config") is not None:
        method = fields.nested("quantization_config").values.get("quant_method")
        raise ValueError(f"{fields.source}: weights quantised by {shown(method)} are not supported")
    with source_named(fields.source):
        return read(fields)


def _hash(fields: Fields) -> HashConfig:
    return HashConfig(
        architecture="TandemHashModel",
        vocab_size=fields.whole("vocab_size"),
        max_position=fields.whole("max_position_embeddings"),
    )


# Families. Their keyword arguments are what differs from `_decoder`.


def _llama(fields: Fields) -> DecoderConfig:
    return _decoder(fields, **_biases(fields), mlp_bias=fields.flag("mlp_bias"))


def _mistral(fields: Fields) -> DecoderConfig:
    _refuse(fields, "attention_bias", "mlp_bias")
    window = _optional_whole(fields, "sliding_window")
    return _decoder(fields, layers=_layers(fields, windows=[window] * _num_layers(fields)))


def _qwen2(fields: Fields) -> DecoderConfig:
    return _decoder(fields, layers=_layers(fields, windows=_qwen_windows(fields)), qkv_bias=True)


def _qwen3(fields: Fields) -> DecoderConfig:
    layers = _layers(fields, windows=_qwen_windows(fields))
    return _decoder(fields, layers=layers, head_norms=True, **_biases(fields))


def _qwen3_moe(fields: Fields) -> DecoderConfig:
    windows = [_optional_whole(fields, "sliding_window") if fields.flag("use_sliding_window") else None]
    experts = ExpertsConfig(
        count=fields.whole("num_experts", fields.whole("num_local_experts", 128)),
        used=fields.whole("num_experts_per_tok", 8),
        intermediate_size=fields.whole("moe_intermediate_size", 768),
        renormalised=fields.flag("norm_topk_prob"),
    )
    layers = _layers(fields, windows=windows * _num_layers(fields), has_experts=_qwen_sparse_layers(fields))
    return _decoder(fields, layers=layers, experts=experts, head_norms=True, **_biases(fields))


def _smollm3(fields: Fields) -> DecoderConfig:
    has_rope = _smollm3_rope_layers(fields)
    window = _optional_whole(fields, "sliding_window") if fields.flag("use_sliding_window") else None
    windows = _windows(fields, window, [_FULL if rotates else _SLIDING for rotates in has_rope])
    return _decoder(
        fields,
        layers=_layers(fields, windows=windows, has_rope=has_rope, default_theta=2e6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        mlp_bias=fields.flag("mlp_bias"),
        **_biases(fields),
    )


def _gemma2(fields: Fields) -> DecoderConfig:
    kinds = [_FULL if i % 2 else _SLIDING for i in range(_num_layers(fields))]
    windows = _windows(fields, fields.whole("sliding_window", 4096), kinds)
    return _gemma(
        fields,
        layers=_layers(fields, windows=windows),
        attention_softcap=_optional_number(fields, "attn_logit_softcapping", 50.0),
        logit_softcap=_optional_number(fields, "final_logit_softcapping", 30.0),
    )


def _gemma3(fields: Fields) -> DecoderConfig:
    return _gemma(
        fields,
        layers=_gemma3_layers(fields),
        attention_softcap=_optional_number(fields, "attn_logit_softcapping"),
        logit_softcap=_optional_number(fields, "final_logit_softcapping"),
        head_norms=True,
    )


def _gemma3_with_vision(fields: Fields) -> DecoderConfig:
    """Its text part. Files leave out what is as in the smallest of these models."""
    text = fields.nested("text_config")
    defaults = {
        "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
        "architectures": ["Gemma3ForCausalLM"],
    }  # fmt: skip
    given = {key: value for key, value in text.values.items() if value is not None and key != "architectures"}
    return _gemma3(Fields(defaults | given, text.source))


def _gemma(fields: Fields, **own: Any) -> DecoderConfig:
    _refuse(fields, "use_bidirectional_attention")
    return _decoder(
        fields,
        activation=_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        head_dim=fields.whole("head_dim", 256),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=fields.whole("hidden_size") ** 0.5,
        norm_offset=1.0,
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        post_norms=True,
        **_biases(fields),
        **own,
    )


def _phi3(fields: Fields) -> DecoderConfig:
    _refuse(fields, "attention_bias", "mlp_bias")
    window = _optional_whole(fields, "sliding_window")
    return _decoder(
        fields,
        layers=_layers(fields, windows=[window] * _num_layers(fields)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        fused_projections=True,
    )


def _mixtral(fields: Fields) -> DecoderConfig:
    _refuse(fields, "attention_bias", "mlp_bias")
    num_layers = _num_layers(fields)
    windows = [_optional_whole(fields, "sliding_window")] * num_layers
    return _decoder(
        fields,
        layers=_layers(fields, windows=windows, has_experts=[True] * num_layers, default_theta=1e6),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        experts=ExpertsConfig(
            count=fields.whole("num_local_experts", 8),
            used=fields.whole("num_experts_per_tok", 2),
            intermediate_size=fields.whole("intermediate_size"),
        ),
    )


# What families share.


def _decoder(fields: Fields, **own: Any) -> DecoderConfig:
    num_heads = fields.whole("num_attention_heads")
    shared: dict[str, Any] = {
        "architecture": fields.values["architectures"][0],
        "vocab_size": fields.whole("vocab_size"),
        "hidden_size": fields.whole("hidden_size"),
        "intermediate_size": fields.whole("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": fields.whole("num_key_value_heads", num_heads),
        "head_dim": _head_dim(fields),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "max_position": stretched_position(fields, rope_object(fields)),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
    }
    if "activation" not in own:
        shared["activation"] = _activation(fields, "hidden_act", "silu")
    if "layers" not in own:
        shared["layers"] = _layers(fields, windows=[None] * _num_layers(fields))
    return DecoderConfig(**(shared | own))


def _layers(
    fields: Fields,
    *,
    windows: list[int | None],
    has_rope: list[bool] | None = None,
    has_experts: list[bool] | None = None,
    default_theta: float = 10000.0,
) -> tuple[LayerConfig, ...]:
    """Layers that all have the same rotary positions, or none."""
    rope = read_rope(fields, rope_object(fields), head_dim=_head_dim(fields), default_theta=default_theta)
    everywhere = [True] * len(windows)
    nowhere = [False] * len(windows)
    return tuple(
        LayerConfig(rope=rope if rotates else None, window=window, has_experts=is_sparse)
        for window, rotates, is_sparse in zip(windows, has_rope or everywhere, has_experts or nowhere, strict=True)
    )


def _num_layers(fields: Fields) -> int:
    return fields.whole("num_hidden_layers", high=MAX_LAYERS)


def _head_dim(fields: Fields) -> int:
    return fields.whole("head_dim", max(1, fields.whole("hidden_size") // fields.whole("num_attention_heads")))


def _activation(fields: Fields, key: str, default: str) -> str:
    if fields.text(key, default) not in ACTIVATIONS:
        raise fields.error(key, ", ".join(f"'{name}'" for name in ACTIVATIONS))
    return fields.text(key, default)


def _biases(fields: Fields) -> dict[str, bool]:
    has_bias = fields.flag("attention_bias")
    return {"qkv_bias": has_bias, "attention_output_bias": has_bias}


def _windows(fields: Fields, window: int | None, default_kinds: list[str]) -> list[int | None]:
    """The window of each layer, from `layer_types` where the file has it."""
    kinds = fields.values.get("layer_types") or default_kinds
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(default_kinds)
        or any(k not in (_SLIDING, _FULL) for k in kinds)
    ):
        raise fields.error("layer_types", f"a list of {len(default_kinds)} out of '{_FULL}' and '{_SLIDING}'")
    return [window if kind == _SLIDING else None for kind in kinds]


def _refuse(fields: Fields, *keys: str) -> None:
    for key in keys:
        if fields.values.get(key):
            raise fields.error(key, "false")


def _optional_whole(fields: Fields, key: str) -> int | None:
    return None if fields.values.get(key) is None else fields.whole(key)


def _optional_number(fields: Fields, key: str, default: float | None = None) -> float | None:
    """A null is no number; a key that is not there is the default."""
    if key not in fields.values:
        return default
    return None if fields.values[key] is None else fields.number(key)


# What one family alone has.


def _qwen_windows(fields: Fields) -> list[int | None]:
    """Off unless asked for; then in the upper layers only."""
    window = _optional_whole(fields, "sliding_window") if fields.flag("use_sliding_window") else None
    first = fields.whole("max_window_layers", 28, low=0)
    return _windows(fields, window, [_SLIDING if i >= first else _FULL for i in range(_num_layers(fields))])


def _qwen_sparse_layers(fields: Fields) -> list[bool]:
    dense = set(fields.whole_list("mlp_only_layers") or [])
    step = fields.whole("decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(_num_layers(fields))]


def _smollm3_rope_layers(fields: Fields) -> list[bool]:
    interval = fields.whole("no_rope_layer_interval", 4)
    default = [int((i + 1) % interval != 0) for i in range(_num_layers(fields))]
    rotates = fields.whole_list("no_rope_layers") or default
    if len(rotates) < len(default):
        raise fields.error("no_rope_layers", f"a list of {len(default)}, 1 for a layer with positions and 0 for others")
    return [bool(each) for each in rotates[: len(default)]]


def _gemma3_layers(fields: Fields) -> tuple[LayerConfig, ...]:
    """Layers with a window have rotary positions of their own."""
    interval = fields.whole("sliding_window_pattern", fields.whole("_sliding_window_pattern", 6))
    kinds = [_SLIDING if (i + 1) % interval else _FULL for i in range(_num_layers(fields))]
    windows = _windows(fields, fields.whole("sliding_window", 4096), kinds)
    local, full = _gemma3_ropes(fields)
    return tuple(LayerConfig(rope=full if window is None else local, window=window) for window in windows)


def _gemma3_ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """transformers 5 has an object for each kind of layer; before, `rope_scaling` was that of the full ones."""
    head_dim = fields.whole("head_dim", 256)
    if fields.values.get("rope_parameters"):
        by_kind = fields.nested("rope_parameters")
        return (
            read_rope(fields, by_kind.nested(_SLIDING), head_dim=head_dim),
            read_rope(fields, by_kind.nested(_FULL), head_dim=head_dim, default_theta=1e6),
        )
    local = RopeConfig(dim=head_dim, theta=fields.number("rope_local_base_freq", 10000.0))
    return local, read_rope(fields, rope_object(fields), head_dim=head_dim, default_theta=1e6)


_READERS: dict[str, Callable[[Fields], DecoderConfig | HashConfig]] = {
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_with_vision,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "SmolLM3ForCausalLM": _smollm3,
    "TandemHashModel": _hash,
}
