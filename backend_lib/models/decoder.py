"""The transformer decoder that a `DecoderConfig` describes, eager and in float32, for CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from backend_lib.checkpoint import DecoderConfig
from backend_lib.models.attention import Span, attend, make_spans
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.linear import Linear
from backend_lib.models.rope import Rope

# T tokens in the step · L sequences whose logits are wanted · V vocabulary · E hidden size
# H query heads · K key-value heads · D head_dim


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019)."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """`qkv` gives the H query heads, then K of keys, then K of values."""

    qkv: Linear
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __call__(self, x: torch.Tensor, step: Step, pool: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        step.rope.rotate_(heads[:, : self.num_heads + self.num_kv_heads], step.cos, step.signed_sin)
        query, key_value = heads[:, : self.num_heads], heads[:, self.num_heads :]
        pool.index_copy_(0, step.kv_index, key_value.view(len(x), 2, self.num_kv_heads, self.head_dim))
        return self.output(attend(query, pool, step.spans))


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x)); `gate_up` gives gate, then up."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True, kw_only=True)
class Layer:
    attention_norm: RMSNorm
    attention: Attention
    mlp_norm: RMSNorm
    mlp: GatedMLP

    def __call__(self, hidden: torch.Tensor, step: Step, pool: torch.Tensor) -> None:
        """Add this layer's part to `hidden`, float32 [T, E], in place."""
        hidden += self.attention(self.attention_norm(hidden), step, pool)
        hidden += self.mlp(self.mlp_norm(hidden))


@dataclass(frozen=True, kw_only=True)
class Step:
    """What all layers need of a step."""

    rope: Rope
    cos: torch.Tensor
    signed_sin: torch.Tensor
    kv_index: torch.Tensor
    spans: list[Span]


class TransformerDecoder:
    """A `Decoder` (see `backend_lib.models.batch`). Its KV pool is a list with one tensor a layer.

    Args:
        embedding: float32 or float16 [V, E].
        head: the linear layer from hidden states to logits.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embedding: torch.Tensor,
        layers: list[Layer],
        norm: RMSNorm,
        head: Linear,
        rope: Rope,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.rope = rope
        self.vocab_size = config.vocab_size
        self.kv_bytes_per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4  # float32

    def allocate_kv(self, num_tokens: int) -> list[torch.Tensor]:
        """Per layer float32 [num_tokens + 1, 2, K, D]: a token's keys, then its values; one gather reads both."""
        shape = (num_tokens + 1, 2, self.config.num_kv_heads, self.config.head_dim)
        return [torch.zeros(shape) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        """Write the step's keys and values into `kv` and return float32 logits [L, V]."""
        cos, signed_sin = self.rope.at(batch.positions)
        step = Step(rope=self.rope, cos=cos, signed_sin=signed_sin, kv_index=batch.kv_index, spans=make_spans(batch))
        hidden = F.embedding(batch.input_ids, self.embedding).float()
        for layer, pool in zip(self.layers, kv, strict=True):
            layer(hidden, step, pool)
        return self.head(self.norm(hidden[batch.logits_index]))
