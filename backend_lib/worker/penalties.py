"""Penalties for tokens that are there already, from counters that live on the device beside the rows."""

from __future__ import annotations

import torch

from backend_lib.worker.sequence import Sequence

# P penalised rows of logits · R rows · V vocabulary


class Penalties:
    """Counts each row's output tokens and remembers its prompt's. Nothing is allocated before a row needs it.

    A sampled token is counted on the device, in the order of the stream: so a step can be launched before its
    predecessor's tokens are known here.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._factors = torch.empty(0)  # [R, 3] repetition, presence, frequency
        self._counts = torch.empty(0)  # int32 [R, V]
        self._in_prompt = torch.empty(0)  # bool [R, V]

    def set_row(self, sequence: Sequence, vocab_size: int) -> None:
        """Begin a row: with a prompt, and what has been produced by an earlier worker or before a pause."""
        rules, row = sequence.rules, sequence.row
        assert rules is not None
        if not len(self._counts):
            self._allocate(vocab_size)
        self._factors[row] = torch.tensor([rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty])
        prompt_len = len(sequence.prompt_ids)
        self._in_prompt[row] = False
        self._in_prompt[row, _ids(sequence, 0, prompt_len, self._device)] = True
        self._counts[row] = 0
        produced = _ids(sequence, prompt_len, sequence.known_len, self._device)
        self._counts[row].index_add_(0, produced, torch.ones_like(produced, dtype=torch.int32))

    def apply(self, logits: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Change the rows of float32 [L, V] logits at int64 [P] `places`, which belong to int64 [P] `rows`."""
        scores, counts = logits[places], self._counts[rows]
        repetition, presence, frequency = self._factors[rows].T[..., None]
        has_come = counts > 0
        factor = torch.where(has_come | self._in_prompt[rows], repetition, 1.0)
        scores = torch.where(scores > 0, scores / factor, scores * factor)
        logits[places] = scores - frequency * counts - presence * has_come

    def count(self, token_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Both int64 [P]: the rows have a new token each."""
        self._counts[rows, token_ids] += 1

    def _allocate(self, vocab_size: int) -> None:
        self._factors = torch.zeros((self._num_rows, 3), device=self._device)
        self._counts = torch.zeros((self._num_rows, vocab_size), dtype=torch.int32, device=self._device)
        self._in_prompt = torch.zeros((self._num_rows, vocab_size), dtype=torch.bool, device=self._device)


def _ids(sequence: Sequence, start: int, stop: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(sequence.known_ids(start, stop).astype("int64")).to(device)
