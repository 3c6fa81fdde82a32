"""What a step's sampler needs to know, and what it asks of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from backend_lib.worker.device import Put
from backend_lib.worker.grammar import mask_of, mask_width
from backend_lib.worker.logit_rules import LogitRules
from backend_lib.worker.logprobs import Logprobs, row_width
from backend_lib.worker.sequence import Sequence

# L rows of logits, to which padding may be added · R rows of sequences · V vocabulary · W words of a mask


class RowParams(NamedTuple):
    """The sampling parameters of every row, on the device: [R] each. Written when a row changes hands."""

    temperature: torch.Tensor  # float32, 0 is greedy
    top_p: torch.Tensor  # float32
    log_min_p: torch.Tensor  # float32, minus infinity is none
    top_k: torch.Tensor  # int64, 0 is all
    seed: torch.Tensor  # int64, any 64 bits
    sequence_index: torch.Tensor  # int64

    def at(self, rows: torch.Tensor) -> RowParams:
        return RowParams(*(each[rows] for each in self))


class Counters(NamedTuple):
    """Of every row, on the device: penalties, and the tokens that they look at."""

    factors: torch.Tensor  # float32 [R, 3]: repetition, presence, frequency
    counts: torch.Tensor  # int32 [R, V], output tokens
    in_prompt: torch.Tensor  # bool [R, V]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatch:
    """A step's rows of logits. Tensors are on the device, arrays in host memory.

    Attributes:
        padded: int64 [2, >= L], row and position of each row of logits; filled up with the spare row.
        rows: int64 [L], the sequence's row of each row of logits.
        positions: int64 [L], place of the sampled token in its sequence.
        plain: int64, which of the L are drawn from the whole vocabulary, or what min-p leaves of it.
        filtered: int64, which of the L are drawn from what top-k and top-p leave.
        candidates: largest top_k among the filtered, 0 when one of them has none.
        has_min_p: whether any row has.
        masked, masks: int64 [G] which of the L have a grammar, and int32 [G, W] the masks of what it allows.
        limited, limits: likewise, of those that may sample only certain tokens.
        banned: int64 [2, B], pairs (row of logits, token id) that must not be sampled; `bans`: float32 [B].
        bias_at, bias: int64 [2, C] pairs (row of logits, token id), and float32 [C], what is added there.
        penalised, penalised_rows: int64 [P], which of the L have penalties, and their rows.
        told: places in the L of those that tell log-probabilities; `told_at` is that as int64 tensor.
        logprob_width: tokens of their widest.
    """

    padded: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    plain: np.ndarray
    filtered: np.ndarray
    candidates: int
    has_min_p: bool
    masked: torch.Tensor
    masks: torch.Tensor
    limited: torch.Tensor
    limits: torch.Tensor
    banned: torch.Tensor
    bans: torch.Tensor
    bias_at: torch.Tensor
    bias: torch.Tensor
    penalised: torch.Tensor
    penalised_rows: torch.Tensor
    told: list[int]
    told_at: torch.Tensor
    logprob_width: int

    @property
    def is_plain(self) -> bool:
        """Nothing but temperature and filters: a draw is all there is to it."""
        changes = (self.masked, self.limited, self.bans, self.bias, self.penalised, self.told_at)
        return not any(len(each) for each in changes)

    @classmethod
    def of(
        cls, sequences: list[Sequence], positions: list[int], vocab_size: int, put: Put = torch.from_numpy, *,
        size: int = 0, spare_row: int = 0,
    ) -> SamplingBatch:  # fmt: skip
        """For the sequences that a step samples, all of whose tokens before it are known.

        `size`: rows of logits that it is filled up to.
        """
        count = len(sequences)
        padded = np.empty((2, max(size, count)), dtype=np.int64)
        padded[0, :count], padded[1, :count] = [sequence.row for sequence in sequences], positions
        padded[0, count:], padded[1, count:] = spare_row, 0
        places = put(padded)
        special = [(place, sequence) for place, sequence in enumerate(sequences) if sequence.is_special]
        return cls(
            padded=places,
            rows=places[0, :count],
            positions=places[1, :count],
            **_filters(sequences),
            has_min_p=any(sequence.min_p for _, sequence in special),
            **(_special(special, padded[0], vocab_size, put) if special else _NOTHING_SPECIAL),
        )


def _filters(sequences: list[Sequence]) -> dict:
    plain: list[int] = []
    filtered: list[int] = []
    for place, sequence in enumerate(sequences):
        if sequence.temperature > 0:
            (filtered if sequence.top_k or sequence.top_p < 1 else plain).append(place)
    top_k = [sequences[place].top_k for place in filtered]
    return {
        "plain": _int64(plain),
        "filtered": _int64(filtered),
        "candidates": max(top_k) if top_k and all(top_k) else 0,
    }


def _special(special: list[tuple[int, Sequence]], rows: np.ndarray, vocab_size: int, put: Put) -> dict:
    masked, masks = _masks(special, vocab_size)
    ruled = [(place, sequence.rules) for place, sequence in special if sequence.rules]
    limited = [(place, rules.allowed) for place, rules in ruled if rules.allowed is not None]
    limits = [mask_of(allowed.tolist(), vocab_size) for _, allowed in limited]
    banned = [(place, token) for place, sequence in special for token in sequence.banned_token_ids]
    penalised = _int64([place for place, rules in ruled if rules.penalises])
    told = [place for place, sequence in special if sequence.logprobs is not None]
    bias_at, bias = _biases(ruled)
    return {
        "masked": put(_int64(masked)),
        "masks": put(masks),
        "limited": put(_int64([place for place, _ in limited])),
        "limits": put(np.array(limits, dtype=np.int32).reshape(len(limits), mask_width(vocab_size))),
        "banned": put(np.ascontiguousarray(_int64(banned).reshape(-1, 2).T)),
        "bans": put(np.full(len(banned), -np.inf, dtype=np.float32)),
        "bias_at": put(bias_at),
        "bias": put(bias),
        "penalised": put(penalised),
        "penalised_rows": put(rows[penalised]),
        "told": told,
        "told_at": put(_int64(told)),
        "logprob_width": max((row_width(sequence.logprobs) for _, sequence in special), default=0),
    }


def _masks(special: list[tuple[int, Sequence]], vocab_size: int) -> tuple[list[int], np.ndarray]:
    """One that has ended runs a step too far, and has no next token."""
    states = [(place, sequence.grammar_state) for place, sequence in special if not sequence.told_finish]
    masked = [(place, state) for place, state in states if state is not None]
    masks = np.empty((len(masked), mask_width(vocab_size)), dtype=np.int32)
    for row, (_, state) in zip(masks, masked, strict=True):
        state.fill(row)
    return [place for place, _ in masked], masks


def _biases(ruled: list[tuple[int, LogitRules]]) -> tuple[np.ndarray, np.ndarray]:
    if not ruled:
        return np.empty((2, 0), dtype=np.int64), np.empty(0, dtype=np.float32)
    places = np.repeat([place for place, _ in ruled], [len(rules.bias) for _, rules in ruled])
    at = np.stack([places, np.concatenate([rules.bias_ids for _, rules in ruled])])
    return at, np.concatenate([rules.bias for _, rules in ruled])


class StartedRows(NamedTuple):
    """The sampling parameters of sequences that have been given a row.

    Attributes:
        rows: int64 [S].
        floats, ints: float32 and int64 [3, S], in the order of `RowParams`.
        penalised: of those with penalties.
    """

    rows: torch.Tensor
    floats: torch.Tensor
    ints: torch.Tensor
    penalised: list[PenalisedRow]

    @classmethod
    def of(cls, sequences: list[Sequence], put: Put = torch.from_numpy) -> StartedRows:
        floats = [
            [each.temperature for each in sequences],
            [each.top_p for each in sequences],
            [math.log(each.min_p) if each.min_p else -math.inf for each in sequences],
        ]
        ints = [
            [each.top_k for each in sequences],
            [_signed(each.seed) for each in sequences],
            [each.sequence_index for each in sequences],
        ]
        return cls(
            rows=put(_int64([each.row for each in sequences])),
            floats=put(np.array(floats, dtype=np.float32)),
            ints=put(_int64(ints)),
            penalised=[PenalisedRow.of(each, put) for each in sequences if each.rules and each.rules.penalises],
        )


class PenalisedRow(NamedTuple):
    """Attributes:
    factors: float32 [3].
    prompt_ids, output_ids: int64, what the sequence begins with: it may have been here before.
    """

    row: int
    factors: torch.Tensor
    prompt_ids: torch.Tensor
    output_ids: torch.Tensor

    @classmethod
    def of(cls, sequence: Sequence, put: Put) -> PenalisedRow:
        rules, prompt_len = sequence.rules, len(sequence.prompt_ids)
        assert rules is not None
        factors = [rules.repetition_penalty, rules.presence_penalty, rules.frequency_penalty]
        return cls(
            row=sequence.row,
            factors=put(np.array(factors, dtype=np.float32)),
            prompt_ids=put(sequence.known_ids(0, prompt_len).astype(np.int64)),
            output_ids=put(sequence.known_ids(prompt_len, sequence.known_len).astype(np.int64)),
        )


class SamplingOperations(Protocol):
    """On one kind of device: eager torch on a CPU, Triton kernels on a GPU. `logits` are float32 [L, V], changed in
    place."""

    def mask(self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
        """Minus infinity for what int32 [G, W] masks do not allow, in the rows at int64 [G] places."""

    def add_at(self, logits: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
        """Add float32 [C] at int64 [2, C] pairs (row of logits, token id), all different."""

    def penalise(self, logits: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, counters: Counters) -> None:
        """In the rows of logits at int64 [P] places, which belong to int64 [P] rows."""

    def count(self, token_ids: torch.Tensor, rows: torch.Tensor, counters: Counters) -> None:
        """Both int64 [P]: the rows have a new token each."""

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> Logprobs:
        """Of int64 [L] tokens and the likeliest ones."""

    def draw(self, logits: torch.Tensor, params: RowParams, batch: SamplingBatch) -> torch.Tensor:
        """int64 [L] token ids."""

    def relay(self, token_ids: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> None:
        """table[rows] = token_ids, int64 [L], [L] and [R]."""


def _signed(seed: int) -> int:
    """The same 64 bits."""
    return seed - (1 << 64) if seed >> 63 else seed


def _int64(values: list) -> np.ndarray:
    return np.array(values, dtype=np.int64)


_NOTHING_SPECIAL = _special([], _int64([]), 0, torch.from_numpy)
