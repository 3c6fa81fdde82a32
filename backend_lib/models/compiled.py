"""A decoder whose whole step is one program of the CPU kernels: no eager operation, no copy, no Python in between.

It says what `backend_lib.models.decoder` says, layer by layer; what it cannot say (experts, other weights) runs there.
With several ranks the program stops where they add up what they have: after the embedding, and twice a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from backend_lib.models.batch import ForwardBatch
from backend_lib.models.cpu_program import Buffers, Sum, decoder_rows
from backend_lib.models.decoder import TransformerDecoder
from backend_lib.models.division import divide
from backend_lib.models.linear import Linear
from backend_lib.models.mlp import GatedMLP
from backend_lib.models.parallel import gathered, own_places
from backend_lib.models.quantised import QuantisedEmbedding, QuantisedLinear
from backend_lib.models.threads import team
from kernels.cpu import operations, program
from kernels.cpu.attention import PAIRS, plan_blocks
from kernels.cpu.ir import LANES
from kernels.cpu.matmul import GROUP

# T tokens in the step, at most `capacity` · L sequences whose logits are wanted · V vocabulary · E hidden size
# H query heads · K key-value heads · D head_dim


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
        for each in decoder_rows(self._decoder, self._buffers, self._kv_type.itemsize):
            if isinstance(each, list):
                rows.append(each)
            else:
                self._sums.append(Sum(len(rows), torch.from_numpy(each)))
        self.operations = operations.table(rows)
        step, scratch = self.step, self._buffers.scratch
        step[program.BLOCKS] = self._buffers.blocks.ctypes.data
        step[program.SCRATCH], step[program.SCRATCH_BYTES] = scratch.ctypes.data, scratch.strides[0]
