"""A decoder described by data, the same whatever file format it came in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for a longer context.

    Attributes:
        kind: `linear` divides every frequency by `factor`; `llama3` divides the low ones and blends the middle ones;
            `factors` divides frequency i by `factors[i]`.
        factors: head_dim / 2 divisors.
        low_freq_factor, high_freq_factor, original_max_position: bounds of llama3's blend, in wavelengths per
            original context.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder with rotary positions, grouped-query attention and a SiLU-gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    max_position: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need an even one")


@dataclass(frozen=True, kw_only=True)
class HashConfig:
    """The test-only model that computes nothing; it has no weights."""

    architecture: str
    vocab_size: int
    max_position: int
