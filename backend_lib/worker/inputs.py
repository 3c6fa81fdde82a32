"""A plan as arrays, and from those the batch that a decoder computes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from backend_lib.models.batch import CHUNK_WORDS, ForwardBatch, chunk_words
from backend_lib.worker.device import Put
from backend_lib.worker.logprobs import row_width
from backend_lib.worker.sampling import StartedRows
from backend_lib.worker.scheduler import Chunk, Plan
from backend_lib.worker.sequence import Sequence

# T tokens in the step · n decode rows · S sequences · L that sample · P tokens of spans

_NO_IDS = torch.empty(0, dtype=torch.int64)
_NO_CHUNKS = torch.empty((0, CHUNK_WORDS), dtype=torch.int32)


class PromptSpan(NamedTuple):
    """Tokens of a prompt whose successors' log-probabilities are wanted: `start` up to `stop`, all but the last.

    `targets`: int64 [stop - start] those successors; `width`: tokens of a record.
    """

    sequence: Sequence
    start: int
    stop: int
    targets: torch.Tensor
    width: int


class StagedBatch:
    """What a forward needs that is not on the device already. Tensors are there unless they are empty, lists are not.

    Attributes:
        num_decodes, padded: n, and how many rows they are filled up to.
        token_rows, positions, kv_index: int64 [T].
        prompt_ids: int64 [T - n], ids of the step's tokens after the decode rows.
        chunks: int32 [S - n, 4], the sequences after those: see `ForwardBatch`.
        prompt_logits_index: int64 [L - n + P], among the tokens after the decode rows: the last of every chunk that
            samples, and then those of the spans. None in a step of decode rows only.
        rows, query_lens, kv_lens: one per sequence.
        prompt_spans: of P tokens in all.
        started: sequences that have been given a row in this step, if any.
        cached: row and int32 indices of what each of them found in the prefix cache.
    """

    def __init__(self, plan: Plan, put: Put, *, padded: int) -> None:
        prefills = plan.chunks[plan.num_decodes :]
        self.num_decodes, self.padded = plan.num_decodes, padded
        self.token_rows, self.positions, self.kv_index = put(np.stack([plan.rows, plan.positions, plan.kv_index]))
        self.rows = [chunk.sequence.row for chunk in plan.chunks]
        self.query_lens = [chunk.length for chunk in plan.chunks]
        self.kv_lens = [chunk.start + chunk.length for chunk in plan.chunks]
        self.started = StartedRows.of(plan.started, put) if plan.started else None
        self.cached = [(each.row, put(each.cached_indices)) for each in plan.started if len(each.cached_indices)]
        self.prompt_spans: list[PromptSpan] = []
        self.prompt_ids, self.chunks, self.prompt_logits_index = _NO_IDS, _NO_CHUNKS, None
        if prefills:
            n = self.num_decodes
            self.prompt_ids = put(_known_ids(prefills))
            self.chunks = put(chunk_words(self.rows[n:], self.query_lens[n:], self.kv_lens[n:]))
            self.prompt_logits_index = put(self._logits_index(prefills, put))

    def _logits_index(self, prefills: list[Chunk], put: Put) -> np.ndarray:
        ends = np.cumsum([chunk.length for chunk in prefills], dtype=np.int64)
        parts = [ends[[chunk.samples for chunk in prefills]] - 1]
        for chunk, end in zip(prefills, ends.tolist(), strict=True):
            span = _span(chunk, put)
            if span:
                self.prompt_spans.append(span)
                parts.append(np.arange(span.stop - span.start) + end - chunk.length)
        return np.concatenate(parts)


def _span(chunk: Chunk, put: Put) -> PromptSpan | None:
    sequence = chunk.sequence
    stop = min(chunk.start + chunk.length, len(sequence.prompt_ids) - 1)
    if sequence.prompt_logprobs is None or stop <= chunk.start:
        return None
    targets = put(sequence.prompt_ids[chunk.start + 1 : stop + 1].astype(np.int64))
    return PromptSpan(sequence, chunk.start, stop, targets, row_width(sequence.prompt_logprobs))


def _known_ids(prefills: list[Chunk]) -> np.ndarray:
    pieces = [chunk.sequence.known_ids(chunk.start, chunk.start + chunk.length) for chunk in prefills]
    return np.concatenate(pieces).astype(np.int64)


class InputStage(Protocol):
    """Makes a batch of what was staged and what is on the device: the tokens that the rows have sampled last."""

    def padded(self, num_decodes: int) -> int:
        """How many decode rows a step is filled up to."""

    def stage(
        self, staged: StagedBatch, relay: torch.Tensor, kv_table: torch.Tensor, spare_row: int, spare_index: int
    ) -> ForwardBatch:
        """Writes the step's indices into `kv_table`. `relay`: int64 [R + 1], the newest token of each row."""


class FreshInputs:
    """Every step has tensors of its own: for a CPU."""

    def padded(self, num_decodes: int) -> int:
        return num_decodes

    def stage(
        self, staged: StagedBatch, relay: torch.Tensor, kv_table: torch.Tensor, spare_row: int, spare_index: int
    ) -> ForwardBatch:
        n = staged.num_decodes
        kv_table[staged.token_rows, staged.positions] = staged.kv_index.int()
        decoded = relay[staged.token_rows[:n]]
        assert n == 0 or decoded.min() >= 0, "a row is decoded before its token was sampled"
        return ForwardBatch(
            input_ids=torch.cat([decoded, staged.prompt_ids]), token_rows=staged.token_rows,
            positions=staged.positions, kv_index=staged.kv_index, **described(staged, kv_table),
        )  # fmt: skip


def described(staged: StagedBatch, kv_table: torch.Tensor) -> dict:
    """What of a `ForwardBatch` is the same on all devices."""
    return {
        "kv_table": kv_table,
        "num_decodes": staged.padded,
        "padding": staged.padded - staged.num_decodes,
        "prompt_logits_index": staged.prompt_logits_index,
        "chunks": staged.chunks,
        "rows": staged.rows,
        "query_lens": staged.query_lens,
        "kv_lens": staged.kv_lens,
    }
