"""The kernels between a decoder's products, each against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.device.bench import Bench
from benchmarks.device.guarded import Guarded, close, joined
from kernels.activation import KINDS, gated, reference_gated
from kernels.decode_attention import DecodePlan, decode_attention, plan_decode, reference_decode_attention
from kernels.experts import Workspace, experts, reference_experts
from kernels.heads import place_heads, reference_place_heads
from kernels.norm import add_norm, reference_add_norm
from kernels.prefill_attention import prefill_attention, reference_prefill_attention

Verdict = dict[str, Any]

# T tokens · E hidden size · H query heads · K key-value heads · D head_dim


def norm(bench: Bench, dtype: torch.dtype) -> Verdict:
    where, rows, size = bench.gpu.device, bench.scale.rows, bench.scale.large["hidden_size"]
    verdicts = []
    for has_addend, two in ((False, False), (True, False), (True, True)):
        hidden = torch.randn(rows, size, device=where)
        addend = torch.randn(rows, size, device=where).to(dtype) if has_addend else None
        weight, second = torch.rand(2, size, device=where) + 0.5
        out, expected = Guarded(rows, size, dtype=dtype, device=where), hidden.new_empty(rows, size)
        hidden_2 = hidden.clone()
        reference_add_norm(hidden_2, addend, weight, 1e-5, addend_weight=second if two else None, out=expected)
        add_norm(hidden, addend, weight, 1e-5, addend_weight=second if two else None, out=out.view)
        verdicts += [close(out.view, expected, out), close(hidden, hidden_2)]
    return joined(*verdicts)


def heads(bench: Bench, dtype: torch.dtype) -> Verdict:
    where, rows = bench.gpu.device, bench.scale.rows
    verdicts = []
    for (h, k, d), half, normed in (
        *((shape, shape[2] // 2, False) for shape in _shapes(bench, dtype)),
        ((8, 2, 64), 16, True),
    ):
        qkv = torch.randn(rows, h + 2 * k, d, device=where).to(dtype)
        pool = Guarded(2 * rows, 2, k, d, dtype=dtype, device=where)
        index = torch.randperm(2 * rows, device=where)[:rows]
        angles = torch.rand(rows, half, device=where) * 6
        how: dict[str, Any] = {"cos": angles.cos(), "sin": angles.sin()}
        if normed:
            how |= {"norm_weight": torch.rand(h + k, d, device=where) + 0.5, "eps": 1e-5}
        exact, exact_pool = qkv.float(), torch.full(pool.view.shape, torch.nan, device=where)
        reference_place_heads(exact, exact_pool, index, **how)
        place_heads(qkv, pool.view, index, **how)
        untouched = torch.ones(2 * rows, dtype=torch.bool, device=where)
        untouched[index] = False
        verdicts += [
            close(qkv[:, :h], exact[:, :h]), close(pool.view[index], exact_pool[index], pool),
            {"ok": bool(pool.view[untouched].isnan().all())},
        ]  # fmt: skip
    return joined(*verdicts)


def activation(bench: Bench, dtype: torch.dtype) -> Verdict:
    where, rows, size = bench.gpu.device, bench.scale.rows, bench.scale.large["intermediate_size"]
    verdicts = []
    for kind in KINDS:
        both = (2 * torch.randn(rows, 2 * size, device=where)).to(dtype)
        out, exact = Guarded(rows, size, dtype=dtype, device=where), both.new_empty(rows, size, dtype=torch.float64)
        reference_gated(both, exact, kind=kind)
        gated(both, out.view, kind=kind)
        verdicts.append(close(out.view, exact, out))
    return joined(*verdicts)


def decode(bench: Bench, dtype: torch.dtype) -> Verdict:
    rows, longest = min(bench.scale.rows, 24), max(bench.scale.contexts)
    verdicts = []
    for shape, softcap, window in _attentions(bench, dtype, longest // 3):
        lengths = torch.randint(1, longest + 1, (rows,))
        lengths[:2] = torch.tensor([1, longest])
        pool, table = cache_of(bench, lengths.tolist(), shape, dtype)
        where = bench.gpu.device
        multiprocessors = None if where.type == "cuda" else 2
        plan = DecodePlan.allocate(
            rows + 3, shape, dtype=dtype, device=where, window=window, multiprocessors=multiprocessors
        )
        plan.partial.fill_(torch.nan)
        row, positions = torch.randperm(rows, device=where), lengths.to(where) - 1
        positions = positions[row]
        query = queries_of(rows, shape, dtype, where)
        out, exact = (
            Guarded(rows, shape[0] * shape[2], dtype=dtype, device=where),
            query.new_empty(rows, shape[0] * shape[2], dtype=torch.float64),
        )
        how = {"scale": shape[2] ** -0.5, "softcap": softcap, "window": window}
        reference_decode_attention(query, pool, table, row, positions, **how, out=exact)
        plan_decode(positions, plan, window=window)
        decode_attention(query, pool, table, row, positions, plan, **how, out=out.view)
        verdicts.append(close(out.view, exact, out))
    return joined(*verdicts)


def prefill(bench: Bench, dtype: torch.dtype) -> Verdict:
    where, verdicts = bench.gpu.device, []
    most = bench.scale.prefill_chunk // 8
    for shape, softcap, window in _attentions(bench, dtype, max(most // 2, 1)):
        query_lens = [most, 1, max(most // 3, 1)]
        kv_lens = [most, 2, most + most // 2]
        pool, table = cache_of(bench, kv_lens, shape, dtype)
        firsts = [0, most, most + 1]
        chunks = torch.tensor([*zip(firsts, [2, 1, 0], query_lens, kv_lens, strict=True)], dtype=torch.int32)
        table[: len(kv_lens)] = table[: len(kv_lens)].flip(0)
        chunks, tokens = chunks.to(where), sum(query_lens)
        query = queries_of(tokens, shape, dtype, where)
        out, exact = (
            Guarded(tokens, shape[0] * shape[2], dtype=dtype, device=where),
            query.new_empty(tokens, shape[0] * shape[2], dtype=torch.float64),
        )
        how = {"max_query_len": most, "scale": shape[2] ** -0.5, "softcap": softcap, "window": window}
        reference_prefill_attention(query, pool, table, chunks, **how, out=exact)
        prefill_attention(query, pool, table, chunks, **how, out=out.view)
        verdicts.append(close(out.view, exact, out))
    return joined(*verdicts)


def mixture(bench: Bench, dtype: torch.dtype) -> Verdict:
    where = bench.gpu.device
    count, used, hidden, inner = (64, 4, 1024, 512) if where.type == "cuda" else (4, 2, 32, 16)
    shapes = (count, 2 * inner, hidden), (count, hidden, inner)
    weights = [torch.randn(*shape, device=where).mul_(shape[2] ** -0.5).to(dtype) for shape in shapes]
    verdicts = []
    for tokens in (1, bench.scale.rows, 8 * bench.scale.rows if where.type == "cuda" else 5):
        x = torch.randn(tokens, hidden, device=where).to(dtype)
        chosen = torch.rand(tokens, count, device=where).topk(used).indices
        shares = torch.rand(tokens, used, device=where).softmax(-1)
        room = Workspace.allocate(
            max_tokens=tokens, used=used, num_experts=count, hidden_size=hidden, intermediate_size=inner, dtype=dtype,
            device=where,
        )  # fmt: skip
        out, exact = (
            Guarded(tokens, hidden, dtype=dtype, device=where),
            torch.empty(tokens, hidden, dtype=torch.float64),
        )
        reference_experts(
            x.cpu(), chosen.cpu(), shares.cpu(), *(each.cpu() for each in weights), kind="silu", out=exact
        )
        experts(x, chosen, shares, *weights, kind="silu", workspace=room, out=out.view)
        verdicts.append(close(out.view, exact, out))
    return joined(*verdicts)


DENSE: dict[str, Callable[[Bench, torch.dtype], Verdict]] = {
    "norm": norm, "heads": heads, "activation": activation, "decode_attention and decode_plan": decode,
    "prefill_attention": prefill, "experts": mixture,
}  # fmt: skip


def _shapes(bench: Bench, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Compiling takes a second for each: all of them in one type, the main one in the others."""
    config = bench.scale.large
    large = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    return [large, (9, 3, 64), (4, 4, 96), (8, 4, 256)] if dtype == torch.bfloat16 else [large]


def _attentions(
    bench: Bench, dtype: torch.dtype, window: int
) -> Iterator[tuple[tuple[int, int, int], float | None, int | None]]:
    """Shapes, and last of all a soft cap and a window."""
    for shape in _shapes(bench, dtype):
        yield shape, None, None
    yield _shapes(bench, dtype)[-1], 50.0, window


def queries_of(tokens: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A view of projections whose keys and values are NaN: they have been moved to the pool."""
    heads, kv_heads, head_dim = shape
    projected = torch.full((tokens, heads + 2 * kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    projected[:, :heads] = torch.randn(tokens, heads, head_dim, device=device).to(dtype)
    return projected[:, :heads]


def cache_of(
    bench: Bench, lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with each row's tokens scattered over it, NaN elsewhere, and the table that finds them."""
    where, (_, kv_heads, head_dim) = bench.gpu.device, shape
    total = sum(lengths)
    pool = torch.full((total + 2, 2, kv_heads, head_dim), torch.nan, dtype=dtype, device=where)
    pool[:total] = torch.randn(total, 2, kv_heads, head_dim, device=where).to(dtype)
    table = torch.full((len(lengths) + 1, max(lengths) + 3), total, dtype=torch.int32, device=where)
    places = torch.randperm(total, device=where).int()
    for row, part in enumerate(places.split(lengths)):
        table[row, : len(part)] = part
    return pool, table
