"""A step in eager torch, for a CPU: what the layers of a decoder ask for between their products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from backend_lib.models.attention import Span, attend, make_spans
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.decoder import Addend, Attention, HeadNorm, RMSNorm
from backend_lib.models.mlp import MixtureOfExperts
from backend_lib.models.rope import Rope

# T tokens in the step · E hidden size · H query heads · K key-value heads · D head_dim

# By the names of `backend_lib.checkpoint.decoder_config.ACTIVATIONS`.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class EagerStep:
    """A `Step` (see `backend_lib.models.decoder`), all in float32. What several layers need is worked out once."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self._rotations: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._spans: dict[int | None, list[Span]] = {}

    def add_norm(self, hidden: torch.Tensor, addend: Addend, norm: RMSNorm) -> torch.Tensor:
        if addend.value is not None:
            hidden += _normed(addend.value, addend.norm) if addend.norm else addend.value
        return _normed(hidden, norm)

    def attend(self, heads: torch.Tensor, attention: Attention, pool: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        query_key = heads[:, : num_heads + num_kv_heads]
        if attention.head_norm:
            query_key.copy_(_head_normed(query_key, attention.head_norm))
        if attention.rope:
            attention.rope.rotate_(query_key, *self._rotation(attention.rope))
        query, key_value = heads[:, :num_heads], heads[:, num_heads:]
        pool.index_copy_(0, self.batch.kv_index, key_value.view(len(heads), 2, num_kv_heads, attention.head_dim))
        return attend(query, pool, self._spans_of(attention.window), attention.scores)

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate).mul_(up)

    def mix(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, mixture: MixtureOfExperts
    ) -> torch.Tensor:
        out, experts = torch.zeros_like(x), mixture.experts
        assert isinstance(experts, list)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, token, experts[expert](x[token], self) * weights[token, place, None])
        return out

    def _rotation(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of the step's positions."""
        if rope not in self._rotations:
            self._rotations[rope] = rope.at(self.batch.positions)
        return self._rotations[rope]

    def _spans_of(self, window: int | None) -> list[Span]:
        if window not in self._spans:
            self._spans[window] = make_spans(self.batch, window)
        return self._spans[window]


def _normed(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


def _head_normed(heads: torch.Tensor, norm: HeadNorm) -> torch.Tensor:
    return F.rms_norm(heads, norm.weight.shape[1:], eps=norm.eps).mul_(norm.weight)
