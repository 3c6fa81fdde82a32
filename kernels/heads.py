"""From the fused projection to what attention reads, in one launch: norms of heads, rotation, and the KV pool.

T tokens · H query heads · K key-value heads · D head_dim · d the part of it that is rotated · N places in the pool
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.compiling import Specialisation
from kernels.tuning import Config, chosen


@triton.jit(do_not_specialize=["eps"], do_not_specialize_on_alignment=["kv_index"])
def _place_heads_kernel(
    qkv, pool, kv_index, norm_weight, cos, sin, eps, token_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    # A head is (a, b, rest): the two halves that are rotated, and what is not. Each value is read by the thread that
    # writes it, so that working in place is safe.
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    row = qkv + token * token_stride
    halves = tl.arange(0, BLOCK_HALF)[None, :]
    rests = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
    exists = heads < H + 2 * K
    in_half, in_rest = exists & (halves < HALF), exists & (rests < D)
    if HALF:
        a = tl.load(row + heads * D + halves, mask=in_half, other=0.0).to(tl.float32)
        b = tl.load(row + heads * D + HALF + halves, mask=in_half, other=0.0).to(tl.float32)
    if 2 * HALF < D:
        rest = tl.load(row + heads * D + rests, mask=in_rest, other=0.0).to(tl.float32)
    turned = heads < H + K
    if HAS_NORM:
        squares = tl.zeros([HEADS], tl.float32)
        if HALF:
            squares += tl.sum(a * a + b * b, 1)
        if 2 * HALF < D:
            squares += tl.sum(rest * rest, 1)
        inverse = tl.where(turned, tl.div_rn(1.0, tl.sqrt_rn(squares / D + eps))[:, None], 1.0)
        weights = norm_weight + heads * D
        if HALF:
            a *= inverse * tl.load(weights + halves, mask=in_half & turned, other=1.0)
            b *= inverse * tl.load(weights + HALF + halves, mask=in_half & turned, other=1.0)
        if 2 * HALF < D:
            rest *= inverse * tl.load(weights + rests, mask=in_rest & turned, other=1.0)
    place = pool + tl.load(kv_index + token) * (2 * K * D) - H * D
    is_query = heads < H
    if HALF:
        in_row = halves < HALF
        cosine = tl.where(turned, tl.load(cos + token * HALF + halves, mask=in_row, other=0.0), 1.0)
        sine = tl.where(turned, tl.load(sin + token * HALF + halves, mask=in_row, other=0.0), 0.0)
        _store(row, place, heads * D + halves, a * cosine - b * sine, in_half, is_query)
        _store(row, place, heads * D + HALF + halves, b * cosine + a * sine, in_half, is_query)
    if 2 * HALF < D:
        _store(row, place, heads * D + rests, rest, in_rest, is_query)


@triton.jit
def _store(row, place, at, values, mask, is_query):
    """Queries back to where they were; keys and values, which follow in one order in both, into the pool."""
    tl.store(row + at, values.to(row.dtype.element_ty), mask=mask & is_query)
    tl.store(place + at, values.to(place.dtype.element_ty), mask=mask & (is_query == 0))


def place_heads(
    qkv: torch.Tensor, pool: torch.Tensor, kv_index: torch.Tensor, *, norm_weight: torch.Tensor | None = None,
    eps: float = 0.0, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Norm and rotate query and key heads; queries stay in `qkv`, keys and values go to the pool.

    A rotation by (cos, sin) takes the halves (a, b) of a head's first d values to (a cos − b sin, b cos + a sin).

    Args:
        qkv: [T, H + 2K, D], each token's heads contiguous: queries, keys, values. Its keys and values stay as they are.
        pool: [N + 1, 2, K, D], contiguous.
        kv_index: int64 [T], in [0, N].
        norm_weight: float32 [H + K, D]: each head is divided by its root mean square and multiplied by this.
        cos, sin: float32 [T, d / 2], contiguous, d ≤ D.
    """
    tokens, num_heads, head_dim = qkv.shape
    num_kv_heads = pool.shape[2]
    assert qkv.stride()[1:] == (head_dim, 1) and pool.is_contiguous() and pool.shape[3] == head_dim
    if not tokens:
        return
    shape = num_heads - 2 * num_kv_heads, num_kv_heads, head_dim, 0 if cos is None else cos.shape[1]
    constants, config = _constants(*shape)
    _place_heads_kernel[(tokens, triton.cdiv(num_heads, constants["HEADS"]))](
        qkv, pool, kv_index, norm_weight, cos, sin, eps, qkv.stride(0), **constants,
        HAS_NORM=norm_weight is not None, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _constants(num_heads: int, num_kv_heads: int, head_dim: int, half: int) -> tuple[dict[str, int], Config]:
    widest = triton.next_power_of_2(head_dim)
    default = Config({"HEADS": max(1024 // widest, 1)}, 4, 1)
    config = chosen("place_heads", f"{num_heads} {num_kv_heads} {head_dim} {half}", default)
    sizes = {"H": num_heads, "K": num_kv_heads, "D": head_dim, "HALF": half}
    blocks = {name: triton.next_power_of_2(max(size, 1)) for name, size in _widths(head_dim, half)}
    return {**sizes, **config.blocks, **blocks}, config


def _widths(head_dim: int, half: int) -> tuple[tuple[str, int], ...]:
    return ("BLOCK_HALF", half), ("BLOCK_REST", head_dim - 2 * half)


def reference_place_heads(
    qkv: torch.Tensor, pool: torch.Tensor, kv_index: torch.Tensor, *, norm_weight: torch.Tensor | None = None,
    eps: float = 0.0, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
) -> None:  # fmt: skip
    num_kv_heads, head_dim = pool.shape[2:]
    num_queries = qkv.shape[1] - 2 * num_kv_heads
    heads = qkv.to(torch.float32, copy=True)
    turned = heads[:, : num_queries + num_kv_heads]
    if norm_weight is not None:
        turned.copy_(F.rms_norm(turned, (head_dim,), eps=eps) * norm_weight)
    if cos is not None and sin is not None:
        half = cos.shape[1]
        a, b = turned[..., :half].clone(), turned[..., half : 2 * half].clone()
        turned[..., :half] = a * cos[:, None] - b * sin[:, None]
        turned[..., half : 2 * half] = b * cos[:, None] + a * sin[:, None]
    qkv[:, :num_queries] = heads[:, :num_queries].to(qkv.dtype)
    pool[kv_index] = heads[:, num_queries:].reshape(-1, *pool.shape[1:]).to(pool.dtype)


def serving() -> Iterator[Specialisation]:
    for dtype in ("bf16", "fp16", "fp32"):
        for head_dim in (64, 96, 128, 256):
            yield _specialisation(dtype, (32, 8, head_dim, head_dim // 2), has_norm=False)
        yield _specialisation(dtype, (32, 8, 128, 64), has_norm=True)
        yield _specialisation(dtype, (9, 3, 64, 32), has_norm=False)
        yield _specialisation(dtype, (16, 4, 256, 32), has_norm=True)
        yield _specialisation(dtype, (32, 8, 128, 0), has_norm=False)


def _specialisation(dtype: str, shape: tuple[int, int, int, int], *, has_norm: bool) -> Specialisation:
    constants, config = _constants(*shape)
    signature = {
        "qkv": f"*{dtype}", "pool": f"*{dtype}", "kv_index": "*i64", "eps": "fp32", "token_stride": "i32",
    }  # fmt: skip
    absent = {
        name: None for name, given in (("norm_weight", has_norm), ("cos", shape[3]), ("sin", shape[3])) if not given
    }
    signature |= {name: "*fp32" for name in ("norm_weight", "cos", "sin") if name not in absent}
    heads, kv_heads, head_dim, half = shape
    words = f"{dtype}, {heads} + {kv_heads} heads of {head_dim}, {2 * half} rotated" + ", normed" * has_norm
    constexprs = {**constants, **absent, "HAS_NORM": has_norm}
    return Specialisation(
        words, _place_heads_kernel, signature, constexprs, config.num_warps, config.num_stages, ("kv_index",)
    )
