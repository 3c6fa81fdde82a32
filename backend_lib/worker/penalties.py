"""Penalties for tokens that are there already, from counters that live on the device beside the rows."""

from __future__ import annotations

import torch

from backend_lib.worker.sampling import Counters, PenalisedRow, SamplingOperations

# P penalised rows of logits · R rows · V vocabulary


class Penalties:
    """Counts each row's output tokens and remembers its prompt's. Nothing is allocated before a row needs it.

    A sampled token is counted on the device, in the order of the stream: so a step can be launched before its
    predecessor's tokens are known here.
    """

    def __init__(self, num_rows: int, device: torch.device, operations: SamplingOperations) -> None:
        self._num_rows = num_rows
        self._device = device
        self._operations = operations
        self._counters: Counters | None = None

    def start(self, started: PenalisedRow, vocab_size: int) -> None:
        """Begin a row: with a prompt, and what has been produced by an earlier worker or before a pause."""
        if self._counters is None:
            self._counters = self._allocate(vocab_size)
        factors, counts, in_prompt = (each[started.row] for each in self._counters)
        factors.copy_(started.factors)
        in_prompt.zero_().index_fill_(0, started.prompt_ids, True)
        produced = torch.ones_like(started.output_ids, dtype=torch.int32)
        counts.zero_().index_add_(0, started.output_ids, produced)

    def apply(self, logits: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Change the rows of float32 [L, V] logits at int64 [P] `places`, which belong to int64 [P] `rows`."""
        assert self._counters is not None
        self._operations.penalise(logits, places, rows, self._counters)

    def count(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Both int64 [P]: the rows have a new token each."""
        assert self._counters is not None
        self._operations.count(token_ids, rows, self._counters)

    def _allocate(self, vocab_size: int) -> Counters:
        shape = self._num_rows, vocab_size
        return Counters(
            factors=torch.zeros((self._num_rows, 3), device=self._device),
            counts=torch.zeros(shape, dtype=torch.int32, device=self._device),
            in_prompt=torch.zeros(shape, dtype=torch.bool, device=self._device),
        )
