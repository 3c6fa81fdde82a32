"""The transformer decoder that a `DecoderConfig` describes: its layers hold the weights and say what is computed.

The dense products are torch's. What lies between them is done by a `Step`, of which there are two: eager torch on a CPU
(`backend_lib.models.eager`) and Triton kernels on a GPU (`backend_lib.models.kernel_step`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from backend_lib.models.batch import ForwardBatch
from backend_lib.models.division import Share
from backend_lib.models.linear import Linear
from backend_lib.models.mlp import MLP, MixtureOfExperts
from backend_lib.models.parallel import ALONE, Ranks, gathered, own_places
from backend_lib.models.rope import Rope

# T tokens in the step · L sequences whose logits are wanted · V vocabulary · E hidden size · I inner size of an MLP
# H query heads · K key-value heads · D head_dim · U experts that a token uses


@dataclass(frozen=True, kw_only=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019); `weight` is float32 [E]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """RMSNorm of every query and key head by itself; `weight` is float32 [H + K, D]."""

    weight: torch.Tensor
    eps: float


class Scores(NamedTuple):
    """From dot products to scores: times `scale`, then kept within ±`softcap` by tanh, if there is one."""

    scale: float
    softcap: float | None = None


class Addend(NamedTuple):
    """What a sublayer adds to the hidden states, [T, E], through its post norm if it has one. It is added together
    with the next norm, which saves a pass over the hidden states; None before the first."""

    value: torch.Tensor | None
    norm: RMSNorm | None = None

    def at(self, index: torch.Tensor) -> Addend:
        """Of some of the tokens."""
        return self if self.value is None else Addend(self.value[index], self.norm)


class Step(Protocol):
    """What lies between the dense products of one step, on one kind of device."""

    def add_norm(self, hidden: torch.Tensor, addend: Addend, norm: RMSNorm) -> torch.Tensor:
        """Add to float32 [T, E] `hidden` in place; the norm of that, in the type that products take."""

    def attend(self, heads: torch.Tensor, attention: Attention, pool: torch.Tensor) -> torch.Tensor:
        """From [T, H + 2K, D] heads, which are changed, to [T, H * D]: norms and rotates queries and keys, keeps keys
        and values in the pool, and attends."""

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """activation(gate) * up: from [T, 2I] to [T, I]."""

    def mix(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, mixture: MixtureOfExperts
    ) -> torch.Tensor:
        """The sum of the chosen experts of [T, E], [T, E]. `weights` float32 and `chosen` int64 are [T, U]."""


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
        return self.output(step.attend(heads, self, pool))


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The post norms are None in most families. What a rank's attention and MLP compute is its part of a sum."""

    attention_norm: RMSNorm
    attention: Attention
    attention_post_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: MLP
    mlp_post_norm: RMSNorm | None
    ranks: Ranks = ALONE

    def __call__(self, hidden: torch.Tensor, addend: Addend, step: Step, pool: torch.Tensor) -> Addend:
        """Add what came before to `hidden`, float32 [T, E], and return what this layer's last part adds."""
        x = step.add_norm(hidden, addend, self.attention_norm)
        attended = Addend(self._summed(self.attention(x, step, pool)), self.attention_post_norm)
        x = step.add_norm(hidden, attended, self.mlp_norm)
        return Addend(self._summed(self.mlp(x, step)), self.mlp_post_norm)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()  # where codes are multiplied, outputs are filled up to whole panels
        self.ranks.all_reduce(x)
        return x


class TransformerDecoder:
    """A `Decoder` (see `backend_lib.models.batch`), or one rank's share of it. Its KV pool is a list with one tensor a
    layer, and holds the rank's own key-value heads.

    Args:
        embedding: from places among the rank's rows, int64 [T], to float32 [T, E].
        head: the linear layer from hidden states to float32 logits, as many as the rank has rows.
        start_step: what computes a step.
        kv_type: of keys and values.

    Attributes:
        config: of the rank's own part.
        vocab_size: V, of all ranks.
    """

    def __init__(
        self,
        share: Share,
        ranks: Ranks = ALONE,
        *,
        embedding: Callable[[torch.Tensor], torch.Tensor],
        layers: list[Layer],
        norm: RMSNorm,
        head: Linear,
        start_step: Callable[[ForwardBatch], Step],
        kv_type: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.share = share
        self.ranks = ranks
        self.config = share.config
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.vocab_size = share.whole.vocab_size
        self.device = device or torch.device("cpu")
        values = 2 * self.config.num_kv_heads * self.config.head_dim
        self.kv_bytes_per_token = self.config.num_layers * values * kv_type.itemsize
        self._start_step = start_step
        self._kv_type = kv_type

    def allocate_kv(self, num_tokens: int) -> list[torch.Tensor]:
        """Per layer [num_tokens + 1, 2, K, D]: a token's keys, then its values; one gather reads both."""
        shape = (num_tokens + 1, 2, self.config.num_kv_heads, self.config.head_dim)
        # Not zeros: pages that no token has been written to yet cost no memory.
        return [torch.empty(shape, dtype=self._kv_type, device=self.device) for _ in self.layers]

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        """Write the step's keys and values into `kv` and return float32 logits [L, V], or [L, 0] on ranks but 0."""
        step = self._start_step(batch)
        hidden = self._embed(batch.input_ids)
        addend = Addend(None)
        for layer, pool in zip(self.layers, kv, strict=True):
            addend = layer(hidden, addend, step, pool)
        if batch.prompt_logits_index is not None:  # else of every token
            index = batch.logits_index
            if not len(index):
                return torch.empty((0, 0 if self.ranks.rank else self.vocab_size), device=self.device)
            hidden, addend = hidden[index], addend.at(index)
        return self._logits(step.add_norm(hidden, addend, self.norm))

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            hidden = self.embedding(ids)
        else:
            places, is_elsewhere = own_places(ids, self.share.vocabulary)
            hidden = self.embedding(places).masked_fill_(is_elsewhere, 0.0)
            self.ranks.all_reduce(hidden)
        return hidden if self.config.embedding_scale == 1.0 else hidden.mul_(self.config.embedding_scale)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        logits, cap = self.head(x), self.config.logit_softcap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits if self.ranks.size == 1 else gathered(logits, self.vocab_size, self.ranks)
