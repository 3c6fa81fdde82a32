"""A KV pool as attention kernels see it: NaN wherever they may not read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Cached:
    """Some rows' keys and values.

    Attributes:
        pool: [N + 1, 2, K, D], NaN but for what is seen, scattered.
        table: int32 [R + 1, P]; where nothing is seen it leads to NaN. The spare row has the spare index at position 0.
    """

    pool: torch.Tensor
    table: torch.Tensor

    @property
    def spare_row(self) -> int:
        return len(self.table) - 1


def cache(seen: list[range], kv_heads: int, head_dim: int, dtype: torch.dtype) -> Cached:
    """Row r's positions `seen[r]` hold random keys and values."""
    total = sum(map(len, seen))
    pool = torch.full((total + 2, 2, kv_heads, head_dim), torch.nan, dtype=dtype)
    order = torch.randperm(total)
    table = torch.full((len(seen) + 1, max(part.stop for part in seen) + 3), total, dtype=torch.int32)
    at = 0
    for row, part in enumerate(seen):
        table[row, part.start : part.stop] = order[at : at + len(part)]
        at += len(part)
    table[-1, 0] = total + 1
    pool[:total] = torch.randn(total, 2, kv_heads, head_dim)
    pool[total + 1] = torch.randn(2, kv_heads, head_dim)
    return Cached(pool, table)


def queries(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, heads, head_dim] inside projections that are NaN elsewhere, a token too many included."""
    projected = torch.full((tokens + 1, heads + 2 * kv_heads, head_dim), torch.nan, dtype=dtype)
    projected[:tokens, :heads] = torch.randn(tokens, heads, head_dim)
    return projected[:tokens, :heads]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """To compare NaN with itself."""
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    """Of values around 1. In 16 bits the weights are rounded before they are multiplied, then the sum is."""
    bound = 2e-5 if ours.dtype == torch.float32 else 3e-3
    torch.testing.assert_close(ours.double(), exact.double(), rtol=bound, atol=bound)
