"""Attention of prompts, whole or in chunks, over a KV pool that is indexed by token.

A block of M rows, a row being one query head of one token, meets the keys of its key-value head in blocks of N. All
query heads that share a key-value head lie beside each other, so a block covers few tokens and little is wasted at
the causal edge, also where a chunk is short. Only blocks of keys at an edge (the window's, the causal one) are masked;
those before the window or after the last query are not visited. The running maximum is that of Milakov and Gimelshein,
"Online normalizer calculation for softmax" (2018), the division of work that of Dao, "FlashAttention-2" (2023).

A token's result depends, in rounding only, on where it lies in its chunk; not on the other chunks of the step.

T tokens of all chunks · S chunks · H query heads · K key-value heads · G = H / K of them share one · D head_dim ·
M rows of a block · N keys of a block · R rows of the table · P positions
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl

from kernels.compiling import ARCHITECTURES, Specialisation
from kernels.decode_attention import TORCH_TYPES, reference_attend, scores_base_2
from kernels.tuning import Config, chosen


@triton.jit
def visit_keys(
    state, queries, keys, table, begin, stop, position, last,
    IS_MASKED: tl.constexpr, WINDOW: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr,
    TOKEN: tl.constexpr, VALUE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through the keys from `begin` to `stop` in whole blocks.

    Args:
        state: highest score [M], sum of weights [M], weighed values [M, D] so far.
        keys: pointers [1, D] to the pool's first key.
        position: [M], of each row's token; `last`, of the block's last.
        TOKEN, VALUE: elements from a token to the next, and from key to value.
    """
    highest, total, weighed = state
    columns = tl.arange(0, BLOCK_N)
    is_dim = tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM
    # Past the end the last token is read again: what lies there is the row's own, so no load of keys needs a mask.
    index = tl.load(table + tl.minimum(begin + columns, last))
    for first in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
        at = keys + index.to(tl.int64)[:, None] * TOKEN
        index = tl.load(table + tl.minimum(first + BLOCK_N + columns, last))  # a block ahead of the keys it leads to
        if BLOCK_D == HEAD_DIM:
            key = tl.load(at)
            value = tl.load(at + VALUE)
        else:
            key = tl.load(at, mask=is_dim, other=0.0)
            value = tl.load(at + VALUE, mask=is_dim, other=0.0)
        products = tl.dot(queries, tl.trans(key), input_precision="ieee")  # [M, N]
        scores = scores_base_2(products, SCALE, SOFTCAP)
        if IS_MASKED:
            tokens = first + columns
            is_seen = tokens[None, :] <= position[:, None]
            if WINDOW is not None:
                is_seen = is_seen & (tokens[None, :] > position[:, None] - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shift = new_highest
        if IS_MASKED and WINDOW is not None:  # a row may see none of the keys so far
            shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        rescale = tl.exp2(highest - shift)
        weights = tl.exp2(scores - shift[:, None])
        total = total * rescale + tl.sum(weights, 1)
        weighed = tl.dot(weights.to(value.dtype), value, weighed * rescale[:, None], input_precision="ieee")
        highest = new_highest
    return highest, total, weighed


@triton.jit(do_not_specialize_on_alignment=["chunks"])
def prefill_kernel(
    query, query_stride, pool, kv_table, table_stride, chunks, out,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program for a block of a chunk's rows and a key-value head."""
    head, chunk = tl.program_id(1), chunks + 4 * tl.program_id(2)
    first_token, query_len, kv_len = tl.load(chunk), tl.load(chunk + 2), tl.load(chunk + 3)
    # The last tokens look at most keys: they go first, so that the end of the grid is made of short programs.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    if first_row >= query_len * GROUP:
        return
    table = kv_table + tl.load(chunk + 1).to(tl.int64) * table_stride

    rows, dims = first_row + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    is_row = (rows < query_len * GROUP)[:, None]
    # Rows past the chunk's end compute what its last token does, and store nothing.
    token = tl.minimum(rows // GROUP, query_len - 1)
    position = kv_len - query_len + token
    in_out = (first_token + token).to(tl.int64)[:, None]
    heads = (head * GROUP + rows % GROUP)[:, None]
    is_dim = dims[None, :] < HEAD_DIM
    queries = tl.load(
        query + in_out * query_stride + heads * HEAD_DIM + dims[None, :], mask=is_dim, other=0.0
    )  # [M, D]

    low = kv_len - query_len + first_row // GROUP  # positions of the block's first and last token
    high = kv_len - query_len + tl.minimum((first_row + BLOCK_M - 1) // GROUP, query_len - 1)
    begin = tl.maximum(low - WINDOW + 1, 0) if WINDOW is not None else 0
    # From `inner` on no row's window has begun to exclude keys; up to `causal_edge` all rows see them.
    causal_edge = begin + (low + 1 - begin) // BLOCK_N * BLOCK_N
    keys = pool + head * HEAD_DIM + dims[None, :]
    state = (
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
    )
    TOKEN: tl.constexpr = 2 * KV_HEADS * HEAD_DIM
    VALUE: tl.constexpr = KV_HEADS * HEAD_DIM
    inner = begin
    if WINDOW is not None:
        inner += tl.cdiv(tl.maximum(high - WINDOW + 1, begin) - begin, BLOCK_N) * BLOCK_N
        inner = tl.minimum(inner, causal_edge)
        state = visit_keys(
            state, queries, keys, table, begin, inner, position, high,
            True, WINDOW, SCALE, SOFTCAP, TOKEN, VALUE, HEAD_DIM, BLOCK_N, BLOCK_D, STAGES,
        )  # fmt: skip
    state = visit_keys(
        state, queries, keys, table, inner, causal_edge, position, high,
        False, WINDOW, SCALE, SOFTCAP, TOKEN, VALUE, HEAD_DIM, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip
    state = visit_keys(
        state, queries, keys, table, causal_edge, high + 1, position, high,
        True, WINDOW, SCALE, SOFTCAP, TOKEN, VALUE, HEAD_DIM, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip
    _, total, weighed = state
    place = in_out * (KV_HEADS * GROUP * HEAD_DIM) + heads * HEAD_DIM + dims[None, :]
    tl.store(out + place, (weighed / total[:, None]).to(out.dtype.element_ty), mask=is_row & is_dim)


def default_config(head_dim: int, dtype: torch.dtype, architecture: int) -> Config:
    """Blocks: `M` rows and `N` keys. `architecture`: of the device, 80 for instance.

    From 64 rows on, Hopper and Blackwell multiply with whole warp groups; 128 rows read the keys half as often. Ampere
    keeps both operands in registers, and float32 is multiplied from there: so they take smaller blocks.
    """
    if dtype == torch.float32:
        return Config({"M": 16 if head_dim > 128 else 32, "N": 16}, num_warps=8, num_stages=2)
    if head_dim > 128:
        return Config({"M": 128 if architecture >= 90 else 64, "N": 32}, 8, 2)
    return Config({"M": 128, "N": 32 if head_dim > 64 and architecture < 90 else 64}, 8, 3)


def candidates() -> list[Config]:
    """What a tuner may try, where it fits a multiprocessor's registers and shared memory."""
    shapes = [(64, 32, 4), (64, 64, 4), (64, 32, 8), (128, 32, 8), (128, 64, 8), (128, 128, 8), (128, 64, 4)]
    return [Config({"M": rows, "N": keys}, warps, stages) for rows, keys, warps in shapes for stages in (2, 3)]


def prefill_attention(
    query: torch.Tensor, pool: torch.Tensor, kv_table: torch.Tensor, chunks: torch.Tensor, *, max_query_len: int,
    scale: float, softcap: float | None = None, window: int | None = None, out: torch.Tensor,
    config: Config | None = None,
) -> None:  # fmt: skip
    """Causal attention of each chunk's tokens over their sequence. Their own keys and values are in the pool already.

    Args:
        query: [T, H, D]; tokens may lie apart, a token's heads may not.
        pool: [N + 1, 2, K, D], keys and values, contiguous, of query's dtype.
        kv_table: int32 [R + 1, P], row and position → index in the pool.
        chunks: int32 [S, 4], each chunk's first of the T tokens, row, query_len, kv_len: its tokens are the last
            query_len of the kv_len that the row holds. A chunk with query_len 0 computes nothing.
        max_query_len: no chunk is longer.
        scale: of the dot products, whose result is then kept within ±`softcap` by tanh, if there is one.
        window: how many tokens a query looks at, itself included; None is all.
        out: [T, H * D], contiguous. Tokens of no chunk are left as they are.
    """
    heads, head_dim = query.shape[1:]
    assert query.stride()[1:] == (head_dim, 1) and pool.is_contiguous() and out.is_contiguous()
    kv_heads = pool.shape[2]
    config = config or _chosen_config(query)
    blocks = triton.cdiv(max_query_len * (heads // kv_heads), config.blocks["M"])
    prefill_kernel[(blocks, kv_heads, len(chunks))](
        query, query.stride(0), pool, kv_table, kv_table.stride(0), chunks, out,
        **_constants(config, heads, kv_heads, head_dim, scale, softcap, window), num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _chosen_config(query: torch.Tensor) -> Config:
    major, minor = torch.cuda.get_device_capability(query.device) if query.is_cuda else (8, 0)
    head_dim = query.shape[2]
    default = default_config(head_dim, query.dtype, 10 * major + minor)
    return chosen("prefill_attention", f"{head_dim} {query.dtype}", default)


def _constants(
    config: Config, heads: int, kv_heads: int, head_dim: int, scale: float, softcap: float | None, window: int | None
) -> dict[str, int | float | None]:
    return {
        "SCALE": scale,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_M": config.blocks["M"],
        "BLOCK_N": config.blocks["N"],
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "STAGES": config.num_stages,
    }


def serving() -> Iterator[Specialisation]:
    for (dtype, torch_dtype), architecture in product(TORCH_TYPES.items(), ARCHITECTURES):
        for heads, kv_heads, head_dim, softcap, window in (
            (9, 3, 64, None, None), (32, 32, 96, None, 2047), (32, 8, 128, None, None), (8, 4, 256, 50.0, 4096),
        ):  # fmt: skip
            config = default_config(head_dim, torch_dtype, architecture)
            words = f"{dtype}, {heads} on {kv_heads} heads of {head_dim}, window {window}, sm_{architecture}"
            signature = {
                "query": f"*{dtype}", "query_stride": "i32", "pool": f"*{dtype}", "kv_table": "*i32",
                "table_stride": "i32", "chunks": "*i32", "out": f"*{dtype}",
            }  # fmt: skip
            constants = _constants(config, heads, kv_heads, head_dim, head_dim**-0.5, softcap, window)
            yield Specialisation(
                words, prefill_kernel, signature, constants, *config[1:], architectures=(architecture,)
            )


def reference_prefill_attention(
    query: torch.Tensor, pool: torch.Tensor, kv_table: torch.Tensor, chunks: torch.Tensor, *, max_query_len: int,
    scale: float, softcap: float | None = None, window: int | None = None, out: torch.Tensor,
) -> None:  # fmt: skip
    """`prefill_attention`, a token at a time."""
    for first, row, query_len, kv_len in chunks.tolist():
        assert query_len <= max_query_len
        for number in range(query_len):
            position = kv_len - query_len + number
            out[first + number] = reference_attend(
                query[first + number], pool, kv_table[row], position, scale, softcap, window
            )
