"""Rotary positions as a Hugging Face config.json writes them."""

from __future__ import annotations

import math

from backend_lib.checkpoint.decoder_config import RopeConfig, RopeScaling
from backend_lib.checkpoint.fields import Fields


def rope_object(fields: Fields) -> Fields:
    """transformers 5 writes `rope_parameters` with the base inside; before, it was `rope_scaling`, the base beside."""
    return fields.nested("rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling")


def read_rope(fields: Fields, rope: Fields, *, head_dim: int, default_theta: float = 10000.0) -> RopeConfig:
    """`rope` is the object that says how positions are stretched; what it lacks may stand beside it in `fields`."""
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    return RopeConfig(
        dim=int(head_dim * partial),
        theta=rope.number("rope_theta", fields.number("rope_theta", default_theta)),
        scaling=_scaling(fields, rope),
    )


def stretched_position(fields: Fields, rope: Fields) -> int:
    """Tokens a sequence may have. Files with yarn give the length before it was applied, or after."""
    length = fields.whole("max_position_embeddings")
    if rope.values.get(_kind_key(rope)) != "yarn" or "long_factor" in rope.values:
        return length
    return max(length, int(rope.whole("original_max_position_embeddings", length) * rope.number("factor")))


def _kind_key(rope: Fields) -> str:
    return "rope_type" if rope.values.get("rope_type") is not None else "type"  # `type` is the older spelling


def _scaling(fields: Fields, rope: Fields) -> RopeScaling | None:
    kind = rope.text(_kind_key(rope), "default")
    if kind in ("longrope", "su") or "long_factor" in rope.values:  # older files call it `su`, or even `yarn`
        return _longrope(fields, rope)
    # What `dynamic` stretches lies beyond max_position_embeddings, and no sequence gets there.
    if kind in ("default", "dynamic"):
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
    if kind == "yarn":
        return _yarn(fields, rope)
    raise rope.error(_kind_key(rope), "'default', 'linear', 'dynamic', 'llama3', 'yarn', 'longrope'")


def _yarn(fields: Fields, rope: Fields) -> RopeScaling:
    for key in ("mscale", "mscale_all_dim"):
        if rope.values.get(key):
            raise rope.error(key, "none")
    factor = rope.number("factor")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=rope.whole("original_max_position_embeddings", fields.whole("max_position_embeddings")),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor", 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0),
    )


def _longrope(fields: Fields, rope: Fields) -> RopeScaling:
    length = fields.whole("max_position_embeddings")
    original = rope.whole("original_max_position_embeddings", fields.whole("original_max_position_embeddings", length))
    if original < 2:
        raise rope.error("original_max_position_embeddings", "a whole number of at least 2")
    factor = rope.number("factor", length / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        kind="longrope",
        original_max_position=original,
        attention_factor=rope.number("attention_factor", magnitude),
        factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )
