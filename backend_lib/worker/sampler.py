"""From logits to token ids, on the device. A draw is a pure function of logits, seed, sequence and position."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from backend_lib.models.graphs import Graphs, graph_sizes
from backend_lib.worker.device import Put
from backend_lib.worker.logprobs import Logprobs
from backend_lib.worker.penalties import Penalties
from backend_lib.worker.sampling import RowParams, SamplingBatch, SamplingOperations, StartedRows
from backend_lib.worker.sequence import Sequence

# L rows of logits · V vocabulary · R rows

POISON = -1  # what the relay table holds for a row that has sampled nothing yet


class Sampled(NamedTuple):
    """A step's tokens, int64 [L], and log-probabilities of those that tell them, as `SamplingBatch.told`."""

    token_ids: torch.Tensor
    logprobs: Logprobs | None


class Sampler:
    """Keeps each row's parameters, counters and newest token on the device.

    The order is vLLM's: log-probabilities are those of the model's logits, of what a grammar allows. These are then
    changed by allowed tokens, bans, biases and penalties; what is greedy takes the best. What is drawn is divided by
    the temperature and filtered by min-p, top-k and top-p.

    Attributes:
        relay: int64 [R], the token that each row has sampled last: the next step reads it there.
    """

    def __init__(self, num_rows: int, device: torch.device, operations: SamplingOperations) -> None:
        self.relay = torch.full((num_rows,), POISON, dtype=torch.int64, device=device)
        self._device = device
        self._spare_row = num_rows - 1
        self._floats = torch.zeros((3, num_rows), device=device)
        self._ints = torch.zeros((3, num_rows), dtype=torch.int64, device=device)
        self._params = RowParams(*self._floats, *self._ints)
        self._penalties = Penalties(num_rows, device, operations)
        self._operations = operations
        self._graphs = Graphs(device)
        self._logits: torch.Tensor | None = None  # where graphs find them, and by size, what they draw
        self._batches: dict[int, SamplingBatch] = {}

    def start(self, started: StartedRows, vocab_size: int) -> None:
        """Rows change hands."""
        self._floats.index_copy_(1, started.rows, started.floats)
        self._ints.index_copy_(1, started.rows, started.ints)
        self.relay.index_fill_(0, started.rows, POISON)
        for row in started.penalised:
            self._penalties.start(row, vocab_size)

    @torch.inference_mode()
    def capture(self, logits: torch.Tensor, largest: int) -> None:
        """Make graphs for plain batches of up to so many rows, whose logits stand at the beginning of `logits`."""
        self._logits = logits
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=self._device)
        batch = SamplingBatch.of([], [], logits.shape[1])
        for size in graph_sizes(largest):
            padded = torch.zeros((2, size), dtype=torch.int64, device=self._device)
            padded[0] = self._spare_row
            self._batches[size] = dataclasses.replace(batch, padded=padded)
        self._graphs.capture(self._batches, self._draw_padded)

    def batch(self, sequences: list[Sequence], positions: list[int], vocab_size: int, put: Put) -> SamplingBatch:
        """Filled up to a size that has a graph."""
        size = self._graphs.size_for(len(sequences))
        return SamplingBatch.of(sequences, positions, vocab_size, put, size=size, spare_row=self._spare_row)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        """From float32 [L, V] logits, which are changed in place."""
        size = batch.padded.shape[1]
        if self._graphs.has(size) and batch.is_plain:
            assert self._logits is not None and logits.data_ptr() == self._logits.data_ptr()
            self._batches[size].padded.copy_(batch.padded)
            self._graphs.replay(size)
            return Sampled(self._token_ids[: len(logits)], None)
        return self._sample(logits, batch)

    def _sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        operations, told = self._operations, None
        if len(batch.masked):
            operations.mask(logits, batch.masked, batch.masks)
        if batch.told:
            told = logits[batch.told_at]
        self._change(logits, batch)
        token_ids = operations.draw(logits, self._params, batch)
        if len(batch.penalised):
            self._penalties.count(token_ids[batch.penalised], batch.penalised_rows)
        operations.relay(token_ids, batch.rows, self.relay)
        if told is None:
            return Sampled(token_ids, None)
        return Sampled(token_ids, operations.logprobs(told, token_ids[batch.told_at], batch.logprob_width))

    def _change(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        operations = self._operations
        if len(batch.limited):
            operations.mask(logits, batch.limited, batch.limits)
        if len(batch.bans):
            operations.add_at(logits, batch.banned, batch.bans)
        if len(batch.bias):
            operations.add_at(logits, batch.bias_at, batch.bias)
        if len(batch.penalised):
            self._penalties.apply(logits, batch.penalised, batch.penalised_rows)

    def _draw_padded(self, size: int) -> None:
        assert self._logits is not None
        batch = self._batches[size]
        token_ids = self._operations.draw(self._logits[:size], self._params, batch)
        self._token_ids[:size].copy_(token_ids)
        self._operations.relay(token_ids, batch.padded[0], self.relay)
