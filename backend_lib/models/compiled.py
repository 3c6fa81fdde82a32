"""A decoder whose whole step is one program of the CPU kernels: no eager operation, no copy, no Python in between.

It says what `backend_lib.models.decoder` says, layer by layer; what it cannot say (experts, other weights) runs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from backend_lib.checkpoint import DecoderConfig
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.decoder import RMSNorm, TransformerDecoder
from backend_lib.models.linear import Linear
from backend_lib.models.mlp import GatedMLP
from backend_lib.models.quantised import QuantisedEmbedding, QuantisedLinear
from backend_lib.models.rope import Rope
from backend_lib.models.threads import team
from kernels.cpu import operations, program
from kernels.cpu.attention import PAIRS, TILE, plan_blocks
from kernels.cpu.ir import LANES
from kernels.cpu.matmul import GROUP, PANEL
from kernels.cpu.rows import GELU_TANH, SILU

# T tokens in the step, at most `capacity` · L sequences whose logits are wanted · V vocabulary · E hidden size
# H query heads · K key-value heads · D head_dim

ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH}
QUERIES = 32  # times heads that share a key-value head, in a block: their sums stay in the first cache


def can_compile(decoder: TransformerDecoder) -> bool:
    config = decoder.config
    sizes = [config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim]
    return (
        isinstance(decoder.embedding, QuantisedEmbedding)
        and all(isinstance(each, QuantisedLinear) for each in _linears(decoder))
        and all(isinstance(layer.mlp, GatedMLP) for layer in decoder.layers)
        and all(size % GROUP == 0 for size in sizes)
        and config.head_dim % LANES == 0
    )


def half_type(decoder: TransformerDecoder) -> torch.dtype:
    """The type that keys and values are kept in: one of 2 bytes, as the CPU has it, unless heads are of an odd size."""
    if not PAIRS:
        return torch.float16
    return torch.bfloat16 if decoder.config.head_dim % (2 * LANES) == 0 else torch.float32


def _linears(decoder: TransformerDecoder) -> Iterator[Linear]:
    yield decoder.head
    for layer in decoder.layers:
        yield from (layer.attention.qkv, layer.attention.output)
        if isinstance(layer.mlp, GatedMLP):
            yield from (layer.mlp.gate_up, layer.mlp.down)


class CompiledDecoder:
    """A `Decoder` (see `backend_lib.models.batch`). Its KV pool is one tensor, [layer, token, key or value, K, D].

    Logits are valid until the next step.
    """

    def __init__(self, decoder: TransformerDecoder, capacity: int, kv_type: torch.dtype) -> None:
        self.config = decoder.config
        self.vocab_size = decoder.vocab_size
        self._decoder = decoder
        self._kv_type = kv_type
        self.kv_bytes_per_token = decoder.kv_bytes_per_token * kv_type.itemsize // 4
        self.step = np.zeros(program.STEP_WORDS, np.int64)
        self._reserve(capacity)

    def allocate_kv(self, num_tokens: int) -> torch.Tensor:
        config = self.config
        shape = (config.num_layers, num_tokens + 1, 2, config.num_kv_heads, config.head_dim)
        return torch.empty(shape, dtype=self._kv_type)  # pages that no token has been written to cost no memory

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        """Write the step's keys and values into `kv` and return float32 logits [L, V]."""
        logits_index = batch.logits_index
        self._held = batch, logits_index  # the step's words point at these until the next one
        if len(batch.input_ids) > self._buffers.capacity or len(logits_index) > self._buffers.capacity:
            self._reserve(max(len(batch.input_ids), len(logits_index)))
        step, buffers = self.step, self._buffers
        chunks = np.array([batch.rows, batch.query_lens, batch.kv_lens], dtype=np.int64)
        step[program.TOKENS], step[program.LOGITS] = len(batch.input_ids), len(logits_index)
        step[program.IDS], step[program.POSITIONS] = batch.input_ids.data_ptr(), batch.positions.data_ptr()
        step[program.KV_INDEX], step[program.LOGITS_INDEX] = batch.kv_index.data_ptr(), logits_index.data_ptr()
        step[program.KV_TABLE], step[program.KV_TABLE_STRIDE] = batch.kv_table.data_ptr(), batch.kv_table.stride(0) * 4
        step[program.POOLS], step[program.POOL_BYTES] = kv.data_ptr(), kv.stride(0) * kv.itemsize
        blocks = plan_blocks(chunks, buffers.queries, buffers.blocks)
        is_few = blocks < 2 * team().threads
        step[program.NUM_BLOCKS], step[program.HEAD_PARTS] = blocks, self.config.num_kv_heads if is_few else 1
        team().run(self.operations, step)
        return torch.from_numpy(buffers.logits)[: len(logits_index), : self.vocab_size]

    def _reserve(self, capacity: int) -> None:
        """Buffers for as many tokens, and the program that works in them."""
        self._buffers = Buffers(self.config, capacity, team().threads)
        rows = list(_decoder_rows(self._decoder, self._buffers, self._kv_type.itemsize))
        self.operations = operations.table(rows)
        step, scratch = self.step, self._buffers.scratch
        step[program.BLOCKS] = self._buffers.blocks.ctypes.data
        step[program.SCRATCH], step[program.SCRATCH_BYTES] = scratch.ctypes.data, scratch.strides[0]


class Buffers:
    """What the operations of a program work in: pages that no step has come to cost no memory.

    Attributes:
        hidden: float32 [T, E].
        wide: float32 [T, ...], the outputs of a fused projection.
        narrow: float32 [T, ...], what attention gives, and what a post norm takes.
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
        self.codes = np.empty((capacity, widest), np.int8)
        self.scales = np.empty((capacity, widest // GROUP, 2), np.float32)
        self.logits = np.empty((capacity, -(-config.vocab_size // PANEL) * PANEL), np.float32)
        self.rotations: dict[Rope, np.ndarray] = {}
        self.blocks = np.empty((capacity, program.BLOCK_WORDS), np.int64)
        group = config.num_heads // config.num_kv_heads
        self.queries = max(1, QUERIES // group)
        floats = 2 * TILE * size + self.queries * config.num_heads * (2 * size + 4) + self.queries * group * TILE
        self.scratch = np.zeros((threads, -(-floats // 32) * 32), np.float32)


def _decoder_rows(decoder: Any, buffers: Buffers, kv_bytes: int) -> Iterator[list[int]]:
    config, codes, scales = decoder.config, buffers.codes, buffers.scales
    yield operations.embed(decoder.embedding.weight, config.embedding_scale, buffers.hidden)
    for rope in {layer.attention.rope for layer in decoder.layers if layer.attention.rope}:
        buffers.rotations[rope] = np.empty((buffers.capacity, 2, rope.half), np.float32)
        yield operations.rotation(rope.frequencies.numpy(), rope.magnitude, buffers.rotations[rope])
    for place, layer in enumerate(decoder.layers):
        yield from _layer_rows(layer, place, config, buffers, kv_bytes)
    yield _norm_row(decoder.norm, buffers, of_logits=True)
    yield operations.linear(decoder.head, codes, scales, buffers.logits, of_logits=True)
    if config.logit_softcap is not None:
        yield operations.soft_cap(buffers.logits, config.logit_softcap)


def _layer_rows(layer: Any, place: int, config: DecoderConfig, buffers: Buffers, kv_bytes: int) -> Iterator[list[int]]:
    codes, scales, wide = buffers.codes, buffers.scales, buffers.wide
    yield _norm_row(layer.attention_norm, buffers)
    yield operations.linear(layer.attention.qkv, codes, scales, wide)
    yield from _attention_rows(layer.attention, place, buffers, kv_bytes)
    yield operations.quantise(buffers.narrow, layer.attention.output.groups, codes, scales)
    yield from _added_rows(layer.attention.output, layer.attention_post_norm, buffers)
    yield _norm_row(layer.mlp_norm, buffers)
    yield operations.linear(layer.mlp.gate_up, codes, scales, wide)
    yield operations.activate(ACTIVATIONS[config.activation], wide, config.intermediate_size, codes, scales)
    yield from _added_rows(layer.mlp.down, layer.mlp_post_norm, buffers)


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


def _added_rows(linear: QuantisedLinear, post_norm: RMSNorm | None, buffers: Buffers) -> Iterator[list[int]]:
    """hidden += linear(codes), through a norm if there is one."""
    if post_norm is None:
        yield operations.linear(linear, buffers.codes, buffers.scales, buffers.hidden, adds=True)
        return
    yield operations.linear(linear, buffers.codes, buffers.scales, buffers.narrow)
    yield operations.add_norm(buffers.narrow, post_norm.weight.numpy(), post_norm.eps, buffers.hidden)


def _norm_row(norm: RMSNorm, buffers: Buffers, *, of_logits: bool = False) -> list[int]:
    return operations.norm(
        buffers.hidden, norm.weight.numpy(), norm.eps, buffers.codes, buffers.scales, of_logits=of_logits
    )
