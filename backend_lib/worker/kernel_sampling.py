"""The sampler's operations as Triton kernels, for a GPU."""

from __future__ import annotations

import torch

from backend_lib.worker.logprobs import Logprobs
from backend_lib.worker.sampling import Counters, RowParams, SamplingBatch
from kernels.draw import DrawWorkspace, draw
from kernels.logit_rules import add_at, apply_masks
from kernels.logprobs import logprob_stats
from kernels.penalties import apply_penalties, count_tokens
from kernels.relay import scatter_ids

# L rows of logits · V vocabulary


class KernelSampling:
    """See `backend_lib.worker.sampling.SamplingOperations`. Nothing here waits for the device."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._workspace = DrawWorkspace(max_rows, vocab_size, device)

    def mask(self, logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
        apply_masks(logits, places, masks)

    def add_at(self, logits: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
        add_at(logits, at, values)

    def penalise(self, logits: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, counters: Counters) -> None:
        apply_penalties(logits, places, rows, *counters)

    def count(self, token_ids: torch.Tensor, rows: torch.Tensor, counters: Counters) -> None:
        count_tokens(token_ids, rows, counters.counts)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> Logprobs:
        chosen = torch.empty(len(logits), device=logits.device)
        log_sum_exp, ranks = torch.empty_like(chosen), torch.empty_like(token_ids)
        logprob_stats(logits, token_ids, chosen=chosen, log_sum_exp=log_sum_exp, ranks=ranks)
        best, best_ids = logits.topk(min(width - 1, logits.shape[1]), dim=-1)
        return Logprobs(
            ranks=ranks,
            token_ids=torch.cat([token_ids[:, None], best_ids], dim=1),
            logprobs=torch.cat([chosen[:, None], best - log_sum_exp[:, None]], dim=1),
        )

    def draw(self, logits: torch.Tensor, params: RowParams, batch: SamplingBatch) -> torch.Tensor:
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        rows, positions = batch.padded[:, : len(logits)]
        draw(logits, rows, positions, params, self._workspace, out=token_ids)
        return token_ids

    def relay(self, token_ids: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> None:
        scatter_ids(token_ids, rows, table)
