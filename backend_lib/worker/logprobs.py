"""Log-probabilities of sampled and of prompt tokens, as the rows that a slot keeps."""

from __future__ import annotations

import numpy as np
import torch

from backend_lib.arena import logprob_row

# L rows of logits · W tokens of a row: the chosen one, then the likeliest


def logprob_rows(logprobs: torch.Tensor, token_ids: torch.Tensor, width: int) -> np.ndarray:
    """[L] records of `logprob_row(width)`.

    Args:
        logprobs: float32 [L, V].
        token_ids: int64 [L], the token of each row that the others are told beside.

    As in vLLM a rank counts from 1 and takes equals for one better.
    """
    chosen = logprobs.gather(1, token_ids[:, None])
    best, best_ids = logprobs.topk(min(width - 1, logprobs.shape[1]), dim=-1)
    rows = np.zeros(len(logprobs), dtype=logprob_row(width))
    rows["rank"] = (logprobs >= chosen).sum(dim=-1).numpy(force=True)
    rows["token_ids"] = torch.cat([token_ids[:, None], best_ids], dim=1).numpy(force=True)
    rows["logprobs"] = torch.cat([chosen, best], dim=1).numpy(force=True)
    return rows


def row_width(rows: np.ndarray | None) -> int:
    """Tokens of a record; 0 where nothing is told."""
    return 0 if rows is None else rows.dtype["token_ids"].shape[0]


def store(rows: np.ndarray | None, places: slice | int, values: np.ndarray) -> None:
    """Write records into a slot's rows, which may hold fewer tokens each."""
    assert rows is not None
    width = row_width(rows)
    rows["rank"][places] = values["rank"]
    rows["token_ids"][places] = values["token_ids"][..., :width]
    rows["logprobs"][places] = values["logprobs"][..., :width]
