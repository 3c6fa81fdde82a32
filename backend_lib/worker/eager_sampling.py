"""The sampler's operations in eager torch, for a CPU."""

from __future__ import annotations

import numpy as np
import torch

from backend_lib.worker.grammar import apply_masks
from backend_lib.worker.logprobs import Logprobs, logprobs_of
from backend_lib.worker.sampling import Counters, RowParams, SamplingBatch
from kernels.philox import gumbel_noise, gumbel_noise_at

# L rows of logits · V vocabulary · K candidates that top-k may keep · P penalised rows of logits


class EagerSampling:
    """See `backend_lib.worker.sampling.SamplingOperations`."""

    def mask(self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
        apply_masks(logits, places.tolist(), masks)

    def add_at(self, logits: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
        logits[at[0], at[1]] += values

    def penalise(self, logits: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, counters: Counters) -> None:
        scores, counts = logits[places], counters.counts[rows]
        repetition, presence, frequency = counters.factors[rows].T[..., None]
        has_come = counts > 0
        factor = torch.where(has_come | counters.in_prompt[rows], repetition, 1.0)
        scores = torch.where(scores > 0, scores / factor, scores * factor)
        logits[places] = scores - frequency * counts - presence * has_come

    def count(self, token_ids: torch.Tensor, rows: torch.Tensor, counters: Counters) -> None:
        counters.counts[rows, token_ids] += 1

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> Logprobs:
        return logprobs_of(logits, token_ids, width)

    def relay(self, token_ids: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> None:
        table[rows] = token_ids

    def draw(self, logits: torch.Tensor, params: RowParams, batch: SamplingBatch) -> torch.Tensor:
        """A row that is neither plain nor filtered is greedy."""
        token_ids = best_tokens(logits)
        for places, draw in ((batch.plain, _draw), (batch.filtered, _draw_filtered)):
            if len(places):
                index = torch.from_numpy(places)
                token_ids[index] = draw(logits[index], params.at(batch.rows[index]), batch.positions[index], batch)
        return token_ids


def _draw(logits: torch.Tensor, params: RowParams, positions: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    scores = logits.div_(params.temperature[:, None])
    if batch.has_min_p:
        _drop_unlikely(scores, params, scores.amax(dim=-1, keepdim=True))
    noise = gumbel_noise(params.seed, params.sequence_index, positions, scores.shape[1])
    return best_tokens(scores.add_(noise))


def _drop_unlikely(scores: torch.Tensor, params: RowParams, best: torch.Tensor) -> None:
    """Min-p: what is less likely than its share of the best, whose score is `best` [L, 1]."""
    scores.masked_fill_(scores < best + params.log_min_p[:, None], -torch.inf)


def _draw_filtered(
    logits: torch.Tensor, params: RowParams, positions: torch.Tensor, batch: SamplingBatch
) -> torch.Tensor:
    """Draw among each row's candidates, which stand in descending order, [L, K]."""
    width = min(batch.candidates or logits.shape[1], logits.shape[1])
    scores, token_ids = _best(logits.div_(params.temperature[:, None]), width)
    if batch.has_min_p:
        _drop_unlikely(scores, params, scores[:, :1].clone())
    top_k = params.top_k[:, None]
    scores.masked_fill_((top_k > 0) & (torch.arange(width) >= top_k), -torch.inf)
    probabilities = scores.softmax(dim=-1)
    better = probabilities.cumsum(dim=-1) - probabilities  # mass of all better tokens; 0 for the best, so it stays
    scores.masked_fill_(better >= params.top_p[:, None], -torch.inf)
    noise = gumbel_noise_at(params.seed, params.sequence_index, positions, token_ids)
    best = scores.add_(noise).argmax(dim=-1, keepdim=True)
    return token_ids.gather(1, best).squeeze(1)


def best_tokens(scores: torch.Tensor) -> torch.Tensor:
    """int64 [L], the best token of each row [L, V], the first of equals. numpy is 6 times faster than torch."""
    return torch.from_numpy(scores.numpy().argmax(axis=-1).astype(np.int64, copy=False))


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
    return (ordered.long() << 32) | torch.arange(scores.shape[1] - 1, -1, -1)
