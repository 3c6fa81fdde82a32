"""Grouped-query attention over a KV pool that is indexed by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from backend_lib.models.batch import ForwardBatch
from backend_lib.models.decoder import Scores

# q query tokens of a sequence · n tokens they look at · K key-value heads · G query heads that share one · D head_dim


class Span(NamedTuple):
    """One sequence's part of a step, the same for all layers with the same window.

    Attributes:
        start, end: its tokens among the step's T.
        kv_index: int32 [n], where the keys and values that any of them looks at lie in the pool.
        mask: bool [q, n], True where a query may look, or None where no mask is needed: a lone query looks at all of
            the n, and a prompt computed in one go is plainly causal.
    """

    start: int
    end: int
    kv_index: torch.Tensor
    mask: torch.Tensor | None


def make_spans(batch: ForwardBatch, window: int | None) -> list[Span]:
    """`window`: how many tokens a query looks at, itself included; None is all before it."""
    spans = []
    start = 0
    for row, query_len, kv_len in zip(batch.rows, batch.query_lens, batch.kv_lens, strict=True):
        first = 0 if window is None else max(0, kv_len - query_len - window + 1)
        mask = _mask(query_len, kv_len - first, window) if query_len > 1 else None
        spans.append(Span(start, start + query_len, batch.kv_table[row, first:kv_len], mask))
        start += query_len
    return spans


def _mask(query_len: int, kv_len: int, window: int | None) -> torch.Tensor | None:
    """For queries that are the last `query_len` of `kv_len` tokens. None where causality is all there is to it."""
    is_short = window is None or kv_len <= window
    if is_short and query_len == kv_len:
        return None
    mask = torch.ones(query_len, kv_len, dtype=torch.bool).tril_(kv_len - query_len)
    return mask if is_short else mask.triu_(kv_len - query_len - window + 1)  # type: ignore[operator]


def attend(query: torch.Tensor, pool: torch.Tensor, spans: list[Span], scores: Scores) -> torch.Tensor:
    """Attention of each sequence over its own tokens.

    Args:
        query: float32 [T, K * G, D].
        pool: float32 [kv_tokens + 1, 2, K, D], keys and values of one layer, this step's included.

    Returns:
        float32 [T, K * G * D].
    """
    flat = pool.flatten(1)
    return torch.cat([_attend_one(query[span.start : span.end], flat, pool.shape, span, scores) for span in spans])


def _attend_one(query: torch.Tensor, flat: torch.Tensor, shape: torch.Size, span: Span, scores: Scores) -> torch.Tensor:
    _, _, kv_heads, head_dim = shape
    query_len, kv_len = span.end - span.start, len(span.kv_index)
    key, value = (
        flat.index_select(0, span.kv_index).view(kv_len, 2, kv_heads, head_dim).permute(1, 2, 0, 3)
    )  # [K, n, D]
    if query_len == 1:
        # The group as query length: the heads that share a key-value head read it once.
        grouped = query.view(1, kv_heads, -1, head_dim)
        return _weigh(grouped, key[None], value[None], span.mask, False, scores).reshape(1, -1)
    # The key-value head as batch, the group as heads: one [q, n] mask serves all of them.
    grouped = query.view(query_len, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    key, value = (each[:, None].expand(-1, grouped.shape[1], -1, -1) for each in (key, value))
    out = _weigh(grouped, key, value, span.mask, span.mask is None, scores)
    return out.permute(2, 0, 1, 3).reshape(query_len, -1)


def _weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scores: Scores,
) -> torch.Tensor:
    if scores.softcap is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scores.scale
        )
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril_()
    weights = query @ key.transpose(-1, -2)
    weights.mul_(scores.scale / scores.softcap).tanh_().mul_(scores.softcap)
    if mask is not None:
        weights.masked_fill_(~mask, float("-inf"))
    return weights.softmax(-1) @ value
