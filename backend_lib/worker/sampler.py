"""From logits to token ids, on the device. A draw is a pure function of logits, seed, sequence and position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from backend_lib.worker.grammar import apply_masks, mask_width
from backend_lib.worker.logit_rules import LogitRules
from backend_lib.worker.logprobs import logprob_rows, row_width
from backend_lib.worker.penalties import Penalties
from backend_lib.worker.sequence import Sequence
from kernels.philox import gumbel_noise, gumbel_noise_at

# L rows of logits · V vocabulary · K candidates that top-k may keep


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatch:
    """What the sampler needs to know of a step. A row of logits that is neither plain nor filtered is greedy.

    Attributes:
        rows: int64 [L], the sequence's row of each row of logits.
        positions: int64 [L], place of the sampled token in its sequence.
        plain: int64, which of the L are drawn from the whole vocabulary, or what min-p leaves of it.
        filtered: int64, which of the L are drawn from what top-k and top-p leave.
        candidates: largest top_k among the filtered, 0 when one of them has none.
        has_min_p: whether any row has.
        masked, masks: which of the L have a grammar, and int32 [G, W] the masks of what it allows.
        banned: int64 [2, B], pairs (row of logits, token id) that must not be sampled.
        allowed: (row of logits, int64 [A]), where only these may be sampled.
        bias_at, bias: int64 [2, C] pairs (row of logits, token id), and float32 [C], what is added there.
        penalised: int64, which of the L have penalties.
        logprobs: int64, which of the L tell log-probabilities.
        logprob_width: tokens of their widest.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    plain: torch.Tensor
    filtered: torch.Tensor
    candidates: int
    has_min_p: bool
    masked: list[int]
    masks: np.ndarray
    banned: torch.Tensor
    allowed: list[tuple[int, torch.Tensor]]
    bias_at: torch.Tensor
    bias: torch.Tensor
    penalised: torch.Tensor
    logprobs: torch.Tensor
    logprob_width: int

    @classmethod
    def of(cls, sequences: list[Sequence], positions: list[int], vocab_size: int) -> SamplingBatch:
        """For the sequences that a step samples, all of whose tokens before it are known."""
        drawn = [place for place, sequence in enumerate(sequences) if sequence.temperature > 0]
        filtered = [place for place in drawn if sequences[place].top_k or sequences[place].top_p < 1]
        plain = [place for place in drawn if place not in filtered] if filtered else drawn
        top_k = [sequences[place].top_k for place in filtered]
        special = [(place, sequence) for place, sequence in enumerate(sequences) if sequence.is_special]
        banned = [(place, token) for place, sequence in special for token in sequence.banned_token_ids]
        ruled = [(place, sequence.rules) for place, sequence in special if sequence.rules]
        told = [place for place, sequence in special if sequence.logprobs is not None]
        return cls(
            rows=_int64([sequence.row for sequence in sequences]),
            positions=_int64(positions),
            plain=_int64(plain),
            filtered=_int64(filtered),
            candidates=max(top_k) if top_k and all(top_k) else 0,
            has_min_p=any(sequence.min_p for _, sequence in special),
            **_masks(special, vocab_size),
            banned=_int64(banned).view(-1, 2).T,
            allowed=[(place, rules.allowed) for place, rules in ruled if rules.allowed is not None],
            **_biases(ruled),
            penalised=_int64([place for place, rules in ruled if rules.penalises]),
            logprobs=_int64(told),
            logprob_width=max((row_width(sequences[place].logprobs) for place in told), default=0),
        )


def _masks(special: list[tuple[int, Sequence]], vocab_size: int) -> dict[str, Any]:
    """One that has ended runs a step too far, and has no next token."""
    states = [(place, sequence.grammar_state) for place, sequence in special if not sequence.finish]
    masked = [(place, state) for place, state in states if state is not None]
    masks = np.empty((len(masked), mask_width(vocab_size)), dtype=np.int32)
    for row, (_, state) in zip(masks, masked, strict=True):
        state.fill(row)
    return {"masked": [place for place, _ in masked], "masks": masks}


def _biases(ruled: list[tuple[int, LogitRules]]) -> dict[str, Any]:
    if not ruled:
        return {"bias_at": torch.empty((2, 0), dtype=torch.int64), "bias": torch.empty(0)}
    places = torch.cat([torch.full_like(rules.bias_ids, place) for place, rules in ruled])
    bias_at = torch.stack([places, torch.cat([rules.bias_ids for _, rules in ruled])])
    return {"bias_at": bias_at, "bias": torch.cat([rules.bias for _, rules in ruled])}


class Sampled(NamedTuple):
    """A step's tokens, int64 [L], and the records of those that tell log-probabilities, in the order of the batch's
    `logprobs`."""

    token_ids: torch.Tensor
    logprobs: np.ndarray | None


class Sampler:
    """Keeps each row's parameters on the device; they are written when a row changes hands, not every step.

    The order is vLLM's: log-probabilities are those of the model's logits, of what a grammar allows. These are then
    changed by allowed tokens, bans, biases and penalties; what is greedy takes the best. What is drawn is divided by
    the temperature and filtered by min-p, top-k and top-p.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._temperature = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._top_p = torch.ones(num_rows, dtype=torch.float32, device=device)
        self._log_min_p = torch.full((num_rows,), -torch.inf, dtype=torch.float32, device=device)
        self._seed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._sequence_index = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._penalties = Penalties(num_rows, device)

    def set_row(self, sequence: Sequence, vocab_size: int) -> None:
        row = sequence.row
        self._temperature[row] = sequence.temperature
        self._top_k[row] = sequence.top_k
        self._top_p[row] = sequence.top_p
        self._log_min_p[row] = math.log(sequence.min_p) if sequence.min_p else -math.inf
        self._seed[row] = sequence.seed - (1 << 64) if sequence.seed >> 63 else sequence.seed  # same 64 bits
        self._sequence_index[row] = sequence.sequence_index
        if sequence.rules and sequence.rules.penalises:
            self._penalties.set_row(sequence, vocab_size)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        """From float32 [L, V] logits, which are changed in place."""
        if batch.masked:
            apply_masks(logits, batch.masked, batch.masks)
        told = logits[batch.logprobs].log_softmax(dim=-1) if len(batch.logprobs) else None
        self._change(logits, batch)
        token_ids = best_tokens(logits)
        if len(batch.plain):
            token_ids[batch.plain] = self._draw(logits[batch.plain], batch, batch.plain)
        if len(batch.filtered):
            token_ids[batch.filtered] = self._draw_filtered(logits[batch.filtered], batch, batch.filtered)
        if len(batch.penalised):
            self._penalties.count(token_ids[batch.penalised], batch.rows[batch.penalised])
        rows = None if told is None else logprob_rows(told, token_ids[batch.logprobs], batch.logprob_width)
        return Sampled(token_ids, rows)

    def _change(self, logits: torch.Tensor, batch: SamplingBatch) -> None:
        for place, allowed in batch.allowed:
            kept = logits[place, allowed]
            logits[place] = -torch.inf
            logits[place, allowed] = kept
        if batch.banned.numel():
            logits[batch.banned[0], batch.banned[1]] = -torch.inf
        if len(batch.bias):
            logits[batch.bias_at[0], batch.bias_at[1]] += batch.bias
        if len(batch.penalised):
            self._penalties.apply(logits, batch.penalised, batch.rows[batch.penalised])

    def _draw(self, logits: torch.Tensor, batch: SamplingBatch, places: torch.Tensor) -> torch.Tensor:
        rows = batch.rows[places]
        scores = logits.div_(self._temperature[rows, None])
        if batch.has_min_p:
            self._drop_unlikely(scores, rows, scores.amax(dim=-1, keepdim=True))
        return best_tokens(scores.add_(gumbel_noise(*self._key(batch, places), scores.shape[1])))

    def _drop_unlikely(self, scores: torch.Tensor, rows: torch.Tensor, best: torch.Tensor) -> None:
        """Min-p: what is less likely than its share of the best, whose score is `best` [L, 1]."""
        scores.masked_fill_(scores < best + self._log_min_p[rows, None], -torch.inf)

    def _draw_filtered(self, logits: torch.Tensor, batch: SamplingBatch, places: torch.Tensor) -> torch.Tensor:
        """Draw among each row's candidates, which stand in descending order, [L, K]."""
        rows = batch.rows[places]
        width = min(batch.candidates or logits.shape[1], logits.shape[1])
        scores, token_ids = _best(logits.div_(self._temperature[rows, None]), width)
        if batch.has_min_p:
            self._drop_unlikely(scores, rows, scores[:, :1].clone())
        top_k = self._top_k[rows, None]
        scores.masked_fill_((top_k > 0) & (torch.arange(width, device=scores.device) >= top_k), -torch.inf)
        probabilities = scores.softmax(dim=-1)
        better = probabilities.cumsum(dim=-1) - probabilities  # mass of all better tokens; 0 for the best, so it stays
        scores.masked_fill_(better >= self._top_p[rows, None], -torch.inf)
        best = scores.add_(gumbel_noise_at(*self._key(batch, places), token_ids)).argmax(dim=-1, keepdim=True)
        return token_ids.gather(1, best).squeeze(1)

    def _key(self, batch: SamplingBatch, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = batch.rows[places]
        return self._seed[rows], self._sequence_index[rows], batch.positions[places]


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """int64 [L], the best token of each row [L, V], the first of equals. On a CPU numpy is 6 times faster."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def _best(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` best of each row and their token ids, best first and equals by id, [L, K].

    Which of equal scores `topk` takes depends on `width`, and so on what else is in the batch: it is asked alone only
    for which tokens are the best, and only where there is no choice.
    """
    if width < scores.shape[1]:
        values, token_ids = scores.topk(width, dim=-1)
        if bool(((scores >= values[:, -1:]).sum(dim=-1) == width).all()):
            token_ids = token_ids.sort(dim=-1).values
            values, order = scores.gather(1, token_ids).sort(dim=-1, descending=True, stable=True)
            return values, token_ids.gather(1, order)
    token_ids = scores.shape[1] - 1 - (_unequal_keys(scores).topk(width, dim=-1).values & 0xFFFFFFFF)
    return scores.gather(1, token_ids), token_ids


def _unequal_keys(scores: torch.Tensor) -> torch.Tensor:
    """int64 [L, V] in the order of the scores, then of falling token ids, without equals; faster than a stable sort.

    A float's bits, read as an integer, have the float's order once those of negatives are turned round.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)


def _int64(values: list) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
