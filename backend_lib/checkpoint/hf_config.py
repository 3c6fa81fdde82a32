"""A decoder's description from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable

from backend_lib.checkpoint.decoder_config import DecoderConfig, HashConfig, RopeScaling
from backend_lib.checkpoint.fields import Fields, source_named


def read_config(fields: Fields) -> DecoderConfig | HashConfig:
    """Raises ValueError naming what is missing or not supported, the architecture first."""
    architectures = fields.values.get("architectures")
    read = _READERS.get(str(architectures[0])) if isinstance(architectures, list) and architectures else None
    if read is None:
        raise fields.error("architectures", ", ".join(f"['{name}']" for name in _READERS))
    if fields.values.get("quantization_config") is not None:
        method = fields.nested("quantization_config").values.get("quant_method")
        raise ValueError(f"{fields.source}: weights quantised by '{method}' are not supported")
    with source_named(fields.source):
        return read(fields)


def _hash(fields: Fields) -> HashConfig:
    return HashConfig(
        architecture="TandemHashModel",
        vocab_size=fields.whole("vocab_size"),
        max_position=fields.whole("max_position_embeddings"),
    )


def _llama(fields: Fields) -> DecoderConfig:
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "'silu'")
    hidden_size = fields.whole("hidden_size")
    num_heads = fields.whole("num_attention_heads")
    attention_bias = fields.flag("attention_bias")
    rope = _rope(fields)
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        vocab_size=fields.whole("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.whole("intermediate_size"),
        num_layers=fields.whole("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.whole("num_key_value_heads", num_heads),
        head_dim=fields.whole("head_dim", hidden_size // num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=rope.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope),
        max_position=fields.whole("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def _rope(fields: Fields) -> Fields:
    """transformers 5 writes `rope_parameters` with the base inside; before, it was `rope_scaling`, the base beside."""
    return fields.nested("rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling")


def _rope_scaling(rope: Fields) -> RopeScaling | None:
    key = "rope_type" if rope.values.get("rope_type") is not None else "type"  # `type` is the older spelling
    kind = rope.text(key, "default")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "1.0")
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=rope.whole("original_max_position_embeddings"),
        )
    raise rope.error(key, "'default', 'linear', 'llama3'")


_READERS: dict[str, Callable[[Fields], DecoderConfig | HashConfig]] = {
    "LlamaForCausalLM": _llama,
    "TandemHashModel": _hash,
}
