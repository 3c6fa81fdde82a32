"""A decoder whose whole step is one program of the CPU kernels: no eager operation, no copy, no Python in between.

It says what `backend_lib.models.decoder` says, layer by layer; what it cannot say (experts, other weights) runs there.
With several ranks the program stops where they add up what they have: after the embedding, and twice a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from backend_lib.checkpoint import DecoderConfig
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.decoder import RMSNorm, TransformerDecoder
from backend_lib.models.division import divide
from backend_lib.models.linear import Linear
from backend_lib.models.mlp import GatedMLP
from backend_lib.models.parallel import Ranks, gathered, own_places
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
    """All ranks of a group are told the same: they must add up the same things."""
    config = decoder.config
    shares = [share.config for share in divide(decoder.share.whole, decoder.ranks.size)]
    inputs = {size for each in shares for size in (each.intermediate_size, each.num_heads * each.head_dim)}
    return (
        isinstance(decoder.embedding, QuantisedEmbedding)
        and all(isinstance(each, QuantisedLinear) for each in _linears(decoder))
        and all(isinstance(layer.mlp, GatedMLP) for layer in decoder.layers)
        and all(size % GROUP == 0 for size in (config.hidden_size, *inputs))
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
    """A `Decoder` (see `backend_lib.models.batch`), or one rank's share of it. Its KV pool is one tensor,
    [layer, token, key or value, K, D], of the rank's own heads.

    Logits are valid until the next step.
    """

    def __init__(self, decoder: TransformerDecoder, capacity: int, kv_type: torch.dtype) -> None:
        self.config = decoder.config
        self.vocab_size = decoder.vocab_size
        self._decoder = decoder
        self._ranks = decoder.ranks
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
        """Write the step's keys and values into `kv` and return float32 logits [L, V], or [L, 0] on ranks but 0."""
        logits_index = batch.logits_index
        if len(batch.input_ids) > self._buffers.capacity or len(logits_index) > self._buffers.capacity:
            self._reserve(max(len(batch.input_ids), len(logits_index)))
        if self._ranks.size == 1:
            self._prepare(batch, batch.input_ids, logits_index, kv)
            team().run(self.operations, self.step)
        else:
            self._run_with_others(batch, logits_index, kv)
        logits = torch.from_numpy(self._buffers.logits)[: len(logits_index), : self.config.vocab_size]
        return logits if self._ranks.size == 1 else gathered(logits, self.vocab_size, self._ranks)

    def _run_with_others(self, batch: ForwardBatch, logits_index: torch.Tensor, kv: torch.Tensor) -> None:
        places, is_elsewhere = own_places(batch.input_ids, self._decoder.share.vocabulary)
        self._prepare(batch, places, logits_index, kv)
        done = 0
        for end, buffer in self._sums:
            team().run(self.operations[done:end], self.step)
            parts = buffer[: len(places)]
            if not done:  # the embedding
                parts.masked_fill_(is_elsewhere, 0.0)
            self._ranks.all_reduce(parts)
            done = end
        team().run(self.operations[done:], self.step)

    def _prepare(self, batch: ForwardBatch, ids: torch.Tensor, logits_index: torch.Tensor, kv: torch.Tensor) -> None:
        """The step's words. `ids`: the rows of the embedding."""
        self._held = batch, ids, logits_index  # the words point at these until the next step
        step, buffers = self.step, self._buffers
        chunks = np.array([batch.rows, batch.query_lens, batch.kv_lens], dtype=np.int64)
        step[program.TOKENS], step[program.LOGITS] = len(ids), len(logits_index)
        step[program.IDS], step[program.POSITIONS] = ids.data_ptr(), batch.positions.data_ptr()
        step[program.KV_INDEX], step[program.LOGITS_INDEX] = batch.kv_index.data_ptr(), logits_index.data_ptr()
        step[program.KV_TABLE], step[program.KV_TABLE_STRIDE] = batch.kv_table.data_ptr(), batch.kv_table.stride(0) * 4
        step[program.POOLS], step[program.POOL_BYTES] = kv.data_ptr(), kv.stride(0) * kv.itemsize
        blocks = plan_blocks(chunks, buffers.queries, buffers.blocks)
        is_few = blocks < 2 * team().threads
        step[program.NUM_BLOCKS], step[program.HEAD_PARTS] = blocks, self.config.num_kv_heads if is_few else 1

    def _reserve(self, capacity: int) -> None:
        """Buffers for as many tokens, and the program that works in them."""
        self._buffers = Buffers(self.config, capacity, team().threads)
        rows: list[list[int]] = []
        self._sums: list[Sum] = []
        for each in _decoder_rows(self._decoder, self._buffers, self._kv_type.itemsize):
            if isinstance(each, list):
                rows.append(each)
            else:
                self._sums.append(Sum(len(rows), torch.from_numpy(each)))
        self.operations = operations.table(rows)
        step, scratch = self.step, self._buffers.scratch
        step[program.BLOCKS] = self._buffers.blocks.ctypes.data
        step[program.SCRATCH], step[program.SCRATCH_BYTES] = scratch.ctypes.data, scratch.strides[0]


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


def _decoder_rows(decoder: Any, buffers: Buffers, kv_bytes: int) -> Iterator[Row]:
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
