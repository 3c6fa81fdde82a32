"""Attention of one new token per sequence over a KV pool that is indexed by token.

`kernels/decode_plan.py` cuts the rows into items that are about equally long. A program for each item and key-value
head computes attention over the item's tokens for all query heads that share the head (as the 16 or more rows of a
matrix product), and another kernel joins the items of a row, each weighted by the sum of its exponentials. The running
maximum is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).

What is the same to the last bit: a row's result, as long as the row is cut at the same places. These depend on its
length and on the size of an item, which grows with all rows' lengths together; another cut changes how float32 sums
are rounded, nothing else. There are no atomics: the same step gives the same bits.

n rows · H query heads · K key-value heads · G = H / K of them share one · D head_dim · T programs aimed at per
key-value head · I = T + n items at most · R rows of the table · P positions
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.compiling import Specialisation
from kernels.decode_plan import DecodePlan, default_config, plan_decode
from kernels.tuning import Config

__all__ = ["DecodePlan", "decode_attention", "plan_decode", "reference_decode_attention"]

LOG2_E = tl.constexpr(1.4426950408889634)
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ITEMS_AT_ONCE = 16  # that a merging program reads


@triton.jit
def scores_base_2(products, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """From dot products to scores whose exponentials are to base 2. An exponential that overflows makes tanh 1."""
    if SOFTCAP is None:
        scores = products * (SCALE * LOG2_E)
    else:
        power = tl.exp2(products * (2 * SCALE / SOFTCAP * LOG2_E))
        scores = SOFTCAP * LOG2_E - (2 * SOFTCAP * LOG2_E) / (power + 1)
    return scores


@triton.jit(do_not_specialize_on_alignment=["rows"])
def items_kernel(
    query, query_stride, pool, kv_table, table_stride, rows, items, num_items, partial, log_sums,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for an item and a key-value head. Heads lie beside each other in the pool and so in the grid."""
    head, item = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(items + 4 * item).to(tl.int64)
    begin, end = tl.load(items + 4 * item + 1), tl.load(items + 4 * item + 2)
    if item >= tl.load(num_items):
        return
    table = kv_table + tl.load(rows + row) * table_stride
    group, dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    is_head, is_dim = (group < GROUP)[:, None], dims[None, :] < HEAD_DIM
    heads = head * GROUP + group[:, None]
    queries = tl.load(
        query + row * query_stride + heads * HEAD_DIM + dims[None, :], mask=is_head & is_dim, other=0.0
    )  # [G, D]

    keys = pool + head * HEAD_DIM + dims[None, :]
    highest = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    weighed = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    columns = tl.arange(0, BLOCK_N)
    # Past the end the last token is read again: what lies there is the row's own, so no load of keys needs a mask.
    index = tl.load(table + tl.minimum(begin + columns, end - 1))
    for first in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        tokens = first + columns
        at = keys + index.to(tl.int64)[:, None] * (2 * KV_HEADS * HEAD_DIM)
        index = tl.load(table + tl.minimum(tokens + BLOCK_N, end - 1))  # a block ahead of the keys it leads to
        if BLOCK_D == HEAD_DIM:
            key = tl.load(at)
            value = tl.load(at + KV_HEADS * HEAD_DIM)
        else:
            key = tl.load(at, mask=is_dim, other=0.0)
            value = tl.load(at + KV_HEADS * HEAD_DIM, mask=is_dim, other=0.0)
        products = tl.dot(queries, tl.trans(key), input_precision="ieee")  # [G, N]
        scores = tl.where((tokens < end)[None, :], scores_base_2(products, SCALE, SOFTCAP), float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        rescale = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total = total * rescale + tl.sum(weights, 1)
        weighed = tl.dot(weights.to(value.dtype), value, weighed * rescale[:, None], input_precision="ieee")
        highest = new_highest

    place = item * (KV_HEADS * GROUP) + heads
    tl.store(partial + place * HEAD_DIM + dims[None, :], weighed / total[:, None], mask=is_head & is_dim)
    place = item * (KV_HEADS * GROUP) + head * GROUP + group
    tl.store(log_sums + place, highest + tl.log2(total), mask=group < GROUP)


@triton.jit
def merge_kernel(
    row_items, partial, log_sums, out, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program for a row and a query head. A lone item has the weight 1, exactly."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = tl.load(row_items + 2 * row), tl.load(row_items + 2 * row + 1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    highest = float("-inf")
    total = 0.0
    weighed = tl.zeros([BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK_I):
        items = first + tl.arange(0, BLOCK_I)
        place = items.to(tl.int64) * HEADS + head
        log_sum = tl.load(log_sums + place, mask=items < end, other=float("-inf"))
        mask = (items < end)[:, None] & is_dim[None, :]
        value = tl.load(partial + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)  # [I, D]
        new_highest = tl.maximum(highest, tl.max(log_sum, 0))
        rescale = tl.exp2(highest - new_highest)
        weights = tl.exp2(log_sum - new_highest)
        total = total * rescale + tl.sum(weights, 0)
        weighed = weighed * rescale + tl.sum(value * weights[:, None], 0)
        highest = new_highest
    tl.store(out + (row * HEADS + head) * HEAD_DIM + dims, (weighed / total).to(out.dtype.element_ty), mask=is_dim)


def decode_attention(
    query: torch.Tensor, pool: torch.Tensor, kv_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor,
    plan: DecodePlan, *, scale: float, softcap: float | None = None, window: int | None = None, out: torch.Tensor,
) -> None:  # fmt: skip
    """Attention of each row's query over the row's tokens. The queries' own keys and values are in the pool already.

    Args:
        query: [n, H, D]; rows may lie apart, a row's heads may not.
        pool: [N + 1, 2, K, D], keys and values, contiguous, of query's dtype.
        kv_table: int32 [R + 1, P], row and position → index in the pool.
        rows: int64 [n].
        positions: int64 [n], those that `plan` was last made for.
        scale: of the dot products, whose result is then kept within ±`softcap` by tanh, if there is one.
        out: [n, H * D], contiguous.
    """
    num_rows, heads, head_dim = query.shape
    assert window == plan.window and len(rows) == len(positions) == num_rows <= len(plan.row_items)
    assert query.stride()[1:] == (head_dim, 1) and pool.is_contiguous() and out.is_contiguous()
    kv_heads, config = pool.shape[2], plan.config
    items_kernel[(kv_heads, plan.target + num_rows)](
        query, query.stride(0), pool, kv_table, kv_table.stride(0), rows, plan.items, plan.num_items, plan.partial,
        plan.log_sums, **_item_constants(config, heads, kv_heads, head_dim, scale, softcap),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    merge_kernel[(heads, num_rows)](
        plan.row_items, plan.partial, plan.log_sums, out, **_merge_constants(heads, head_dim)
    )


def _item_constants(
    config: Config, heads: int, kv_heads: int, head_dim: int, scale: float, softcap: float | None
) -> dict[str, int | float | None]:
    group = heads // kv_heads
    return {
        "SCALE": scale,
        "SOFTCAP": softcap,
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_G": max(16, triton.next_power_of_2(group)),  # what a matrix product takes at least
        "BLOCK_N": config.blocks["N"],
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "STAGES": config.num_stages,
    }


def _merge_constants(heads: int, head_dim: int) -> dict[str, int]:
    block = triton.next_power_of_2(head_dim)
    return {"HEADS": heads, "HEAD_DIM": head_dim, "BLOCK_I": ITEMS_AT_ONCE, "BLOCK_D": block}


def serving() -> Iterator[Specialisation]:
    for dtype, torch_dtype in TORCH_TYPES.items():
        for heads, kv_heads, head_dim, softcap in (
            (9, 3, 64, None), (32, 32, 96, None), (32, 8, 128, None), (8, 4, 256, 50.0), (16, 1, 256, None),
        ):  # fmt: skip
            config = default_config(head_dim, torch_dtype)
            constants = _item_constants(config, heads, kv_heads, head_dim, head_dim**-0.5, softcap)
            words = f"{dtype}, {heads} on {kv_heads} heads of {head_dim}" + ", soft cap" * (softcap is not None)
            signature = {
                "query": f"*{dtype}", "query_stride": "i32", "pool": f"*{dtype}", "kv_table": "*i32",
                "table_stride": "i32", "rows": "*i64", "items": "*i32", "num_items": "*i32", "partial": "*fp32",
                "log_sums": "*fp32",
            }  # fmt: skip
            yield Specialisation(words, items_kernel, signature, constants, config.num_warps, config.num_stages)
        for head_dim in (64, 128, 256):
            signature = {"row_items": "*i32", "partial": "*fp32", "log_sums": "*fp32", "out": f"*{dtype}"}
            name = f"{dtype}, merge, heads of {head_dim}"
            yield Specialisation(name, merge_kernel, signature, _merge_constants(32, head_dim))


def reference_decode_attention(
    query: torch.Tensor, pool: torch.Tensor, kv_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor,
    *, scale: float, softcap: float | None = None, window: int | None = None, out: torch.Tensor,
) -> None:  # fmt: skip
    """`decode_attention`, a row at a time."""
    for place, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        out[place] = reference_attend(query[place], pool, kv_table[row], position, scale, softcap, window)


def reference_attend(
    query: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, position: int, scale: float,
    softcap: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of one token, [H, D], at `position` of a sequence whose indices are `table`: float64 [H * D]."""
    first = 0 if window is None else max(0, position + 1 - window)
    seen = pool[table[first : position + 1].long()].double()  # [tokens, 2, K, D]
    grouped = query.double().view(pool.shape[2], -1, query.shape[1])  # [K, G, D]
    scores = torch.einsum("kgd,nkd->kgn", grouped, seen[:, 0]) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return torch.einsum("kgn,nkd->kgd", scores.softmax(-1), seen[:, 1]).flatten()
