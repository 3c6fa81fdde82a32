"""Grouped-query attention over a KV pool that is indexed by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from backend_lib.models.batch import ForwardBatch

# q query tokens of a sequence · n tokens it holds · K key-value heads · G query heads that share one · D head_dim


class Span(NamedTuple):
    """One sequence's part of a step, the same for all layers.

    Attributes:
        start, end: its tokens among the step's T.
        kv_index: int32 [n], where its keys and values lie in the pool.
        mask: bool [q, n], True where a query may look, or None where no mask is needed: a lone query looks at all of
            the n, and a prompt computed in one go is plainly causal.
    """

    start: int
    end: int
    kv_index: torch.Tensor
    mask: torch.Tensor | None


def make_spans(batch: ForwardBatch) -> list[Span]:
    spans = []
    start = 0
    for row, query_len, kv_len in zip(batch.rows, batch.query_lens, batch.kv_lens, strict=True):
        mask = _mask(query_len, kv_len) if 1 < query_len < kv_len else None
        spans.append(Span(start, start + query_len, batch.kv_table[row, :kv_len], mask))
        start += query_len
    return spans


def _mask(query_len: int, kv_len: int) -> torch.Tensor:
    """Causal, for queries that are the last `query_len` of `kv_len` tokens."""
    return torch.ones(query_len, kv_len, dtype=torch.bool).tril_(kv_len - query_len)


def attend(query: torch.Tensor, pool: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    """Attention of each sequence over its own tokens.

    Args:
        query: float32 [T, K * G, D].
        pool: float32 [kv_tokens + 1, 2, K, D], keys and values of one layer, this step's included.

    Returns:
        float32 [T, K * G * D].
    """
    flat = pool.flatten(1)
    return torch.cat([_attend_one(query[span.start : span.end], flat, pool.shape, span) for span in spans])


def _attend_one(query: torch.Tensor, flat: torch.Tensor, shape: torch.Size, span: Span) -> torch.Tensor:
    _, _, kv_heads, head_dim = shape
    query_len, kv_len = span.end - span.start, len(span.kv_index)
    key, value = (
        flat.index_select(0, span.kv_index).view(kv_len, 2, kv_heads, head_dim).permute(1, 2, 0, 3)
    )  # [K, n, D]
    if query_len == 1:
        # The group as query length: the heads that share a key-value head read it once.
        out = F.scaled_dot_product_attention(query.view(1, kv_heads, -1, head_dim), key[None], value[None])
        return out.reshape(1, -1)
    # The key-value head as batch, the group as heads: one [q, n] mask serves all of them.
    grouped = query.view(query_len, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    key, value = (each[:, None].expand(-1, grouped.shape[1], -1, -1) for each in (key, value))
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=span.mask, is_causal=span.mask is None)
    return out.permute(2, 0, 1, 3).reshape(query_len, -1)
