"""Log-probabilities of sampled and of prompt tokens, as the rows that a slot keeps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from backend_lib.arena import logprob_row

# L rows of logits · V vocabulary · W tokens of a row: the chosen one, then the likeliest


class Logprobs(NamedTuple):
    """As tensors, or as arrays once they have come from the device.

    As in vLLM a rank counts from 1 and takes equals for one better.

    Attributes:
        ranks: int64 [L], of the chosen token.
        token_ids, logprobs: int64 and float32 [L, W].
    """

    ranks: torch.Tensor
    token_ids: torch.Tensor
    logprobs: torch.Tensor


def logprobs_of(logits: torch.Tensor, token_ids: torch.Tensor, width: int) -> Logprobs:
    """Of float32 [L, V] logits.

    Args:
        token_ids: int64 [L], the token of each row that the others are told beside.
        width: W.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    best, best_ids = logprobs.topk(min(width - 1, logprobs.shape[1]), dim=-1)
    return Logprobs(
        ranks=(logprobs >= chosen).sum(dim=-1),
        token_ids=torch.cat([token_ids[:, None], best_ids], dim=1),
        logprobs=torch.cat([chosen, best], dim=1),
    )


def logprob_rows(ranks: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray, width: int) -> np.ndarray:
    """[L] records of `logprob_row(width)`."""
    rows = np.zeros(len(ranks), dtype=logprob_row(width))
    rows["rank"], rows["token_ids"], rows["logprobs"] = ranks, token_ids, logprobs
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
