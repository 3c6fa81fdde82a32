"""What a decoder's layers say, as rows of a CPU program (`kernels.cpu.program`), and the memory that it works in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from backend_lib.checkpoint import DecoderConfig
from backend_lib.models.decoder import RMSNorm
from backend_lib.models.parallel import Ranks
from backend_lib.models.quantised import QuantisedLinear
from backend_lib.models.rope import Rope
from kernels.cpu import operations, program
from kernels.cpu.attention import TILE
from kernels.cpu.matmul import GROUP, PANEL
from kernels.cpu.rows import GELU_TANH, SILU

# T tokens in the step, at most `capacity` · V vocabulary · E hidden size

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}
QUERIES = 32  # times heads that share a key-value head, in a block: their sums stay in the first cache


class Sum(NamedTuple):
    """Where a program stops for the ranks to add up.

    Attributes:
        end: of the operations before that.
        buffer: float32 [capacity, E], contiguous.
    """

    end: int
    buffer: torch.Tensor


# An operation, or the buffer that the ranks add up then.
Row = list[int] | np.ndarray


class Buffers:
    """What the operations of a program work in: pages that no step has come to cost no memory.

    Attributes:
        hidden: float32 [T, E].
        wide: float32 [T, ...], the outputs of a fused projection.
        narrow: float32 [T, ...], what attention gives.
        product: float32 [T, E], what a post norm takes, in the same memory.
        codes, scales: the input of the product that comes next, int8 [T, ...] and float32 [T, ..., 2].
        logits: float32 [T, V], filled up to whole panels.
        blocks: int64 [T, 4], the blocks of queries.
        queries: tokens in a block at most.
    """

    def __init__(self, config: DecoderConfig, capacity: int, threads: int) -> None:
        self.capacity = capacity
        heads, size = config.num_heads + 2 * config.num_kv_heads, config.head_dim
        attended = config.num_heads * size
        widest = max(config.hidden_size, attended, config.intermediate_size)
        self.hidden = np.empty((capacity, config.hidden_size), np.float32)
        self.wide = np.empty((capacity, max(heads * size, 2 * config.intermediate_size)), np.float32)
        self.narrow = np.empty((capacity, max(attended, config.hidden_size)), np.float32)
        self.product = self.narrow.reshape(-1)[: self.hidden.size].reshape(self.hidden.shape)
        self.codes = np.empty((capacity, widest), np.int8)
        self.scales = np.empty((capacity, widest // GROUP, 2), np.float32)
        self.logits = np.empty((capacity, -(-config.vocab_size // PANEL) * PANEL), np.float32)
        self.rotations: dict[Rope, np.ndarray] = {}
        self.blocks = np.empty((capacity, program.BLOCK_WORDS), np.int64)
        group = config.num_heads // config.num_kv_heads
        self.queries = max(1, QUERIES // group)
        floats = 2 * TILE * size + self.queries * config.num_heads * (2 * size + 4) + self.queries * group * TILE
        self.scratch = np.zeros((threads, -(-floats // 32) * 32), np.float32)


def decoder_rows(decoder: Any, buffers: Buffers, kv_bytes: int) -> Iterator[Row]:
    config, codes, scales = decoder.config, buffers.codes, buffers.scales
    yield operations.embed(decoder.embedding.weight, config.embedding_scale, buffers.hidden)
    yield from _sum_of(buffers.hidden, decoder.ranks)
    for rope in {layer.attention.rope for layer in decoder.layers if layer.attention.rope}:
        buffers.rotations[rope] = np.empty((buffers.capacity, 2, rope.half), np.float32)
        yield operations.rotation(rope.frequencies.numpy(), rope.magnitude, buffers.rotations[rope])
    for place, layer in enumerate(decoder.layers):
        yield from _layer_rows(layer, place, config, buffers, kv_bytes)
    yield _norm_row(decoder.norm, buffers, of_logits=True)
    yield operations.linear(decoder.head, codes, scales, buffers.logits, of_logits=True)
    if config.logit_softcap is not None:
        yield operations.soft_cap(buffers.logits, config.logit_softcap)


def _layer_rows(layer: Any, place: int, config: DecoderConfig, buffers: Buffers, kv_bytes: int) -> Iterator[Row]:
    codes, scales, wide = buffers.codes, buffers.scales, buffers.wide
    yield _norm_row(layer.attention_norm, buffers)
    yield operations.linear(layer.attention.qkv, codes, scales, wide)
    yield from _attention_rows(layer.attention, place, buffers, kv_bytes)
    yield operations.quantise(buffers.narrow, layer.attention.output.groups, codes, scales)
    yield from _added_rows(layer.attention.output, layer.attention_post_norm, buffers, layer.ranks)
    yield _norm_row(layer.mlp_norm, buffers)
    yield operations.linear(layer.mlp.gate_up, codes, scales, wide)
    yield operations.activate(ACTIVATIONS[config.activation], wide, config.intermediate_size, codes, scales)
    yield from _added_rows(layer.mlp.down, layer.mlp_post_norm, buffers, layer.ranks)


def _attention_rows(attention: Any, layer: int, buffers: Buffers, kv_bytes: int) -> Iterator[list[int]]:
    shape = attention.num_heads, attention.num_kv_heads, attention.head_dim
    norm = attention.head_norm
    yield operations.heads(
        buffers.wide, shape, layer=layer, kv_bytes=kv_bytes, scale=attention.scores.scale,
        norm=(norm.weight.numpy(), norm.eps) if norm else None,
        rotation=buffers.rotations[attention.rope] if attention.rope else None,
    )  # fmt: skip
    yield operations.attend(
        buffers.wide, shape, buffers.narrow, window=attention.window, cap=attention.scores.softcap, layer=layer,
        kv_bytes=kv_bytes,
    )  # fmt: skip


def _added_rows(linear: QuantisedLinear, post_norm: RMSNorm | None, buffers: Buffers, ranks: Ranks) -> Iterator[Row]:
    """hidden += linear(codes), of all ranks together, through a norm if there is one."""
    codes, scales, hidden = buffers.codes, buffers.scales, buffers.hidden
    if post_norm is None:
        # Rank 0's hidden states and everybody's part of the product: the others' own would be added again.
        yield operations.linear(linear, codes, scales, hidden, adds=ranks.rank == 0)
        yield from _sum_of(hidden, ranks)
        return
    yield operations.linear(linear, codes, scales, buffers.product)
    yield from _sum_of(buffers.product, ranks)
    yield operations.add_norm(buffers.product, post_norm.weight.numpy(), post_norm.eps, hidden)


def _sum_of(buffer: np.ndarray, ranks: Ranks) -> Iterator[np.ndarray]:
    if ranks.size > 1:
        yield buffer


def _norm_row(norm: RMSNorm, buffers: Buffers, *, of_logits: bool = False) -> list[int]:
    return operations.norm(
        buffers.hidden, norm.weight.numpy(), norm.eps, buffers.codes, buffers.scales, of_logits=of_logits
    )
