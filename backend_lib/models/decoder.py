"""The transformer decoder that a `DecoderConfig` describes, eager and in float32, for CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from backend_lib.checkpoint import DecoderConfig
from backend_lib.models.attention import Scores, Span, attend, make_spans
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.linear import Linear
from backend_lib.models.mlp import MLP
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
class HeadNorm:
    """RMSNorm of every query and key head by itself; `weight` is [H + K, D]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(heads, self.weight.shape[1:], eps=self.eps).mul_(self.weight)


@dataclass(frozen=True, kw_only=True)
class Attention:
    """`qkv` gives the H query heads, then K of keys, then K of values."""

    qkv: Linear
    output: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scores: Scores
    rope: Rope | None
    window: int | None
    head_norm: HeadNorm | None = None

    def __call__(self, x: torch.Tensor, step: Step, pool: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        query_key = heads[:, : self.num_heads + self.num_kv_heads]
        if self.head_norm:
            query_key.copy_(self.head_norm(query_key))
        if self.rope:
            self.rope.rotate_(query_key, *step.rotation(self.rope))
        query, key_value = heads[:, : self.num_heads], heads[:, self.num_heads :]
        pool.index_copy_(0, step.batch.kv_index, key_value.view(len(x), 2, self.num_kv_heads, self.head_dim))
        return self.output(attend(query, pool, step.spans(self.window), self.scores))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The post norms are None in most families."""

    attention_norm: RMSNorm
    attention: Attention
    attention_post_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: MLP
    mlp_post_norm: RMSNorm | None

    def __call__(self, hidden: torch.Tensor, step: Step, pool: torch.Tensor) -> None:
        """Add this layer's part to `hidden`, float32 [T, E], in place."""
        attended = self.attention(self.attention_norm(hidden), step, pool)
        hidden += self.attention_post_norm(attended) if self.attention_post_norm else attended
        transformed = self.mlp(self.mlp_norm(hidden))
        hidden += self.mlp_post_norm(transformed) if self.mlp_post_norm else transformed


@dataclass(frozen=True)
class Step:
    """What layers need of a step, worked out once for all that share a rope or a window."""

    batch: ForwardBatch
    _rotations: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _spans: dict[int | None, list[Span]] = field(default_factory=dict)

    def rotation(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of the step's positions."""
        if rope not in self._rotations:
            self._rotations[rope] = rope.at(self.batch.positions)
        return self._rotations[rope]

    def spans(self, window: int | None) -> list[Span]:
        if window not in self._spans:
            self._spans[window] = make_spans(self.batch, window)
        return self._spans[window]


class TransformerDecoder:
    """A `Decoder` (see `backend_lib.models.batch`). Its KV pool is a list with one tensor a layer.

    Args:
        embedding: from int64 [T] ids to float32 [T, E].
        head: the linear layer from hidden states to logits.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        embedding: Callable[[torch.Tensor], torch.Tensor],
        layers: list[Layer],
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.vocab_size = config.vocab_size
        self.kv_bytes_per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4  # float32

    def allocate_kv(self, num_tokens: int) -> list[torch.Tensor]:
        """Per layer float32 [num_tokens + 1, 2, K, D]: a token's keys, then its values; one gather reads both."""
        shape = (num_tokens + 1, 2, self.config.num_kv_heads, self.config.head_dim)
        # Not zeros: pages that no token has been written to yet cost no memory.
        return [torch.empty(shape) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        """Write the step's keys and values into `kv` and return float32 logits [L, V]."""
        step = Step(batch)
        hidden = self.embedding(batch.input_ids)
        if self.config.embedding_scale != 1.0:
            hidden *= self.config.embedding_scale
        for layer, pool in zip(self.layers, kv, strict=True):
            layer(hidden, step, pool)
        logits = self.head(self.norm(hidden[batch.logits_index]))
        cap = self.config.logit_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
