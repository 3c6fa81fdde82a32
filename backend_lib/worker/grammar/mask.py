"""Masks of token ids: bit i % 32 of int32 word i // 32 says whether token i is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

# L rows of logits · V vocabulary · G of them with a grammar · W words of a mask


def mask_width(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def mask_of(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """int32 [W] that allows these."""
    bits = np.zeros(mask_width(vocab_size) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def token_ids_of(mask: np.ndarray) -> list[int]:
    """What int32 [W] allows."""
    ids: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return ids


def apply_masks(logits: torch.Tensor, places: Sequence[int], masks: np.ndarray | torch.Tensor) -> None:
    """Set what is not allowed to minus infinity, in float32 [L, V], in place.

    `places`: which of the L rows, all different; `masks`: int32 [G, W], one for each, in host memory.

    Each byte of a mask is looked up as eight summands, 0 or minus infinity. That takes the same time for any mask;
    xgrammar's own loop over the bits takes three times as long where little is allowed (benchmarks/grammar.py).
    """
    summands = _summands(logits.device)
    octets = torch.as_tensor(masks).view(torch.uint8).to(logits.device).int()
    for place, row in zip(places, octets, strict=True):
        logits[place].add_(summands.index_select(0, row).view(-1)[: logits.shape[1]])


@cache
def _summands(device: torch.device) -> torch.Tensor:
    """float32 [256, 8]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, np.float32(0), np.float32(-np.inf))).to(device)
