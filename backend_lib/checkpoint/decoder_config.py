"""A decoder described by data, the same whatever family it is of and whatever file format it came in."""

from __future__ import annotations

from dataclasses import dataclass

# Several times what any published model has: what these numbers alone make, before a tensor is looked at, stays small.
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 14
MAX_CONTEXT = 1 << 24  # as far as the setting max_model_len goes
MAX_HEAD_DIM = 1 << 14
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")  # of a gate


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for a longer context.

    Attributes:
        kind: `linear` divides every frequency by `factor`; `llama3` divides the low ones and blends the middle ones;
            `yarn` does so along a ramp over the dimensions; `factors` divides frequency i by `factors[i]`; `longrope`
            too, by `long_factors[i]` where sequences may grow beyond `original_max_position`.
        low_freq_factor, high_freq_factor: bounds of llama3's blend, in wavelengths per original context.
        beta_fast, beta_slow: bounds of yarn's ramp, in turns per original context. `truncate` rounds the dimensions
            they fall on outwards.
        attention_factor: cosines and sines are multiplied by it.
        factors, long_factors: divisors, as many as there are frequencies.
    """

    kind: str
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(1e-30 <= each <= 1e30 for each in (*self.factors, *self.long_factors)):
            raise ValueError("rotary factors must be numbers above 0")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"'low_freq_factor' is {self.low_freq_factor}; supported is less than "
                f"'high_freq_factor', {self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions. The first `dim` entries of a head are rotated, the others left as they are."""

    dim: int
    theta: float
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.theta < 2:  # at 1 all frequencies are equal, and yarn would divide by its logarithm
            raise ValueError(f"the rotary base is {self.theta}; supported is at least 2")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
        rope: None is a layer without positions.
        window: how many tokens a query looks at, itself included; None is all before it.
        has_experts: its MLP is a mixture of experts.
    """

    rope: RopeConfig | None
    window: int | None = None
    has_experts: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts: each token goes through `used` of `count` MLPs, weighted by the router's softmax.

    `renormalised`: the weights of those used are scaled to sum to one.
    """

    count: int
    used: int
    intermediate_size: int
    renormalised: bool = True

    def __post_init__(self) -> None:
        check_at_most("number of experts", self.count, MAX_EXPERTS)
        if self.used > self.count:
            raise ValueError(f"{self.used} experts per token are asked for, of {self.count}")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A pre-norm decoder with grouped-query attention and a gated MLP, or experts.

    Attributes:
        activation: of the gate, one of ACTIVATIONS.
        attention_scale: scores are the dot products times this; None is 1 / sqrt(head_dim).
        attention_softcap, logit_softcap: scores, and logits, are cap * tanh(x / cap); None is no cap.
        embedding_scale: embeddings are multiplied by it.
        norm_offset: what the file leaves out of the norms' weights; Gemma's are written less one.
        head_norms: queries and keys are normalised, each head by itself.
        post_norms: what attention and MLP give is normalised before it is added.
        fused_projections: the file holds query, key and value as one tensor, and gate and up as another.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    activation: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    experts: ExpertsConfig | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    post_norms: bool = False
    fused_projections: bool = False

    def __post_init__(self) -> None:
        check_at_most("head_dim", self.head_dim, MAX_HEAD_DIM)
        check_at_most("context", self.max_position, MAX_CONTEXT)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        for dim in {layer.rope.dim for layer in self.layers if layer.rope}:
            if dim % 2 or not 0 < dim <= self.head_dim:
                raise ValueError(
                    f"{dim} of head_dim {self.head_dim} would be rotated; rotary positions need an even number of them"
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, kw_only=True)
class HashConfig:
    """The test-only model that computes nothing; it has no weights."""

    architecture: str
    vocab_size: int
    max_position: int

    def __post_init__(self) -> None:
        check_at_most("context", self.max_position, MAX_CONTEXT)


def check_at_most(what: str, value: int, limit: int) -> None:
    """Raises ValueError naming both."""
    if value > limit:
        raise ValueError(f"{what} {value} is too large; supported is at most {limit}")
