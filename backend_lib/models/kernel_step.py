"""A step by Triton kernels: what the layers of a decoder ask for between their products, on a GPU.

Nothing here reads a value back, and what is launched depends on sizes alone, so a step can be captured as a graph.
"""

from __future__ import annotations

from typing import Any

import torch

from backend_lib.checkpoint import DecoderConfig
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.decoder import Addend, Attention, RMSNorm
from backend_lib.models.mlp import MixtureOfExperts, StackedExperts
from backend_lib.models.rope import Rope
from kernels.activation import gated
from kernels.decode_attention import DecodePlan, decode_attention, plan_decode
from kernels.experts import Workspace as ExpertsWorkspace
from kernels.experts import experts as run_experts
from kernels.heads import place_heads
from kernels.norm import add_norm
from kernels.prefill_attention import prefill_attention

# T tokens in the step · n decode rows · E hidden size · H query heads · K key-value heads · D head_dim


class KernelWorkspace:
    """What the steps of one decoder share: they follow one another on one stream.

    Attributes:
        plans: by window, how the decode rows' keys are divided among programs.
        experts: room for what lies between the products of a mixture of experts.
    """

    def __init__(
        self, config: DecoderConfig, *, max_decodes: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = config.num_heads, config.num_kv_heads, config.head_dim
        multiprocessors = None if device.type == "cuda" else 1  # the interpreter runs one program after another
        self.plans = {
            window: DecodePlan.allocate(
                max_decodes, shape, dtype=dtype, device=device, window=window, multiprocessors=multiprocessors
            )
            for window in {layer.window for layer in config.layers}
        }
        self.experts = _room_for_experts(config, max_tokens, dtype, device) if config.experts else None


def _room_for_experts(
    config: DecoderConfig, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> ExpertsWorkspace:
    assert config.experts is not None
    return ExpertsWorkspace.allocate(
        max_tokens=max_tokens, used=config.experts.used, num_experts=config.experts.count,
        hidden_size=config.hidden_size, intermediate_size=config.experts.intermediate_size, dtype=dtype, device=device,
    )  # fmt: skip


class KernelStep:
    """A `Step` (see `backend_lib.models.decoder`). The hidden states are float32, what products take and give is of the
    type of the weights."""

    def __init__(self, batch: ForwardBatch, workspace: KernelWorkspace, dtype: torch.dtype) -> None:
        self.batch = batch
        self._workspace = workspace
        self._dtype = dtype
        self._rotations: dict[Rope, tuple[torch.Tensor, torch.Tensor]] = {}
        self._planned: set[int | None] = set()

    def add_norm(self, hidden: torch.Tensor, addend: Addend, norm: RMSNorm) -> torch.Tensor:
        out = torch.empty(hidden.shape, dtype=self._dtype, device=hidden.device)
        addend_weight = addend.norm.weight if addend.norm else None
        add_norm(hidden, addend.value, norm.weight, norm.eps, addend_weight=addend_weight, out=out)
        return out

    def attend(self, heads: torch.Tensor, attention: Attention, pool: torch.Tensor) -> torch.Tensor:
        batch, n = self.batch, self.batch.num_decodes
        norm = attention.head_norm
        cos, sin = self._rotation(attention.rope) if attention.rope else (None, None)
        place_heads(
            heads, pool, batch.kv_index, norm_weight=norm.weight if norm else None, eps=norm.eps if norm else 0.0,
            cos=cos, sin=sin,
        )  # fmt: skip
        query = heads[:, : attention.num_heads]
        out = torch.empty(
            (len(heads), attention.num_heads * attention.head_dim), dtype=heads.dtype, device=heads.device
        )
        how: dict[str, Any] = {
            "scale": attention.scores.scale,
            "softcap": attention.scores.softcap,
            "window": attention.window,
        }
        if n:
            rows, positions = batch.token_rows[:n], batch.positions[:n]
            plan = self._plan(attention.window, positions)
            decode_attention(query[:n], pool, batch.kv_table, rows, positions, plan, **how, out=out[:n])
        if len(heads) > n:
            longest = max(batch.query_lens[n - batch.padding :])
            prefill_attention(query[n:], pool, batch.kv_table, batch.chunks, max_query_len=longest, **how, out=out[n:])
        return out

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        out = torch.empty((len(gate_up), gate_up.shape[1] // 2), dtype=gate_up.dtype, device=gate_up.device)
        gated(gate_up, out, kind=activation)
        return out

    def mix(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, mixture: MixtureOfExperts
    ) -> torch.Tensor:
        experts, workspace = mixture.experts, self._workspace.experts
        assert isinstance(experts, StackedExperts) and workspace is not None
        out = torch.empty_like(x)
        run_experts(
            x, chosen, weights, experts.gate_up, experts.down, kind=experts.activation, workspace=workspace, out=out
        )
        return out

    def _rotation(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        if rope not in self._rotations:
            self._rotations[rope] = rope.halves(self.batch.positions)
        return self._rotations[rope]

    def _plan(self, window: int | None, positions: torch.Tensor) -> DecodePlan:
        plan = self._workspace.plans[window]
        if window not in self._planned:
            plan_decode(positions, plan, window=window)
            self._planned.add(window)
        return plan
