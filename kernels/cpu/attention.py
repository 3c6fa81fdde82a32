"""Grouped-query attention over a KV pool that is indexed by token.

A query goes through its tokens in blocks of 16 that begin at multiples of 16, with a running maximum (Milakov and
Gimelshein, 2018). So its result is the same to the last bit, whether it is computed alone or in a long prompt.

Scratch memory of a thread: keys, values, queries and sums, padded to 16 floats.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from kernels.cpu.compiled import jit
from kernels.cpu.ir import (
    F32,
    I32,
    I64,
    LANES,
    VF16,
    VF32,
    VI32,
    call,
    constant,
    exp,
    fma,
    lane_splat,
    load,
    loop,
    procedure,
    reduce_add,
    reduce_max,
    shuffle,
    splat,
    store,
)  # fmt: skip
from kernels.cpu.rows import soft_cap

BLOCK = LANES
_MINUS_INFINITY = float("-inf")


@procedure("iiiiii")
def gather_block(
    b: ir.IRBuilder, size: ir.Value, pool: ir.Value, indices: ir.Value, stride: ir.Value, parts: ir.Value,
    out: ir.Value,
) -> None:  # fmt: skip
    """Rows of [16 parts] at 16 indices, int32, `stride` bytes apart, to float32 [16, 16 parts].

    `size`: 2 for a pool of float16, 4 for one of float32.
    """
    with b.if_else(b.icmp_signed("==", size, I64(2))) as (halves, floats):
        with halves:
            _gather(b, VF16, pool, indices, stride, parts, out)
        with floats:
            _gather(b, VF32, pool, indices, stride, parts, out)


def _gather(
    b: ir.IRBuilder, kind: Any, pool: ir.Value, indices: ir.Value, stride: ir.Value, parts: ir.Value, out: ir.Value
) -> None:
    size = 2 if kind is VF16 else 4
    rows = [b.add(pool, b.mul(b.sext(load(b, indices, 4 * place, I32), I64), stride)) for place in range(BLOCK)]

    def part(index: ir.Value) -> list:
        for place, row in enumerate(rows):
            value = load(b, b.add(row, b.mul(index, I64(size * LANES))), 0, kind)
            to = b.add(out, b.mul(b.add(b.mul(parts, I64(place)), index), I64(4 * LANES)))
            store(b, b.fpext(value, VF32) if kind is VF16 else value, to)
        return []

    loop(b, parts, [], part)


@procedure("iiiiiiiif")
def attend_block(
    b: ir.IRBuilder, query: ir.Value, keys: ir.Value, values: ir.Value, sums: ir.Value, state: ir.Value,
    parts: ir.Value, low: ir.Value, high: ir.Value, cap: ir.Value,
) -> None:  # fmt: skip
    """One query over the tokens `low` up to `high` of a block, at least one.

    Args:
        query: float32 [16 parts], scaled.
        keys, values: float32 [16, 16 parts].
        sums: float32 [16 parts], what `state` weighs: added to.
        state: float32 [2], the largest score so far and the sum of the weights.
        cap: scores stay within it by tanh; 0 is none.
    """
    scores = _scores(b, query, keys, parts)
    with b.if_else(b.fcmp_ordered("==", cap, F32(0.0))) as (plain, capped):
        with plain:
            plain_block = b.block
        with capped:
            limited = soft_cap(b, scores, cap)
            capped_block = b.block
    chosen = b.phi(VF32)
    chosen.add_incoming(scores, plain_block)
    chosen.add_incoming(limited, capped_block)
    lanes = ir.Constant(VI32, list(range(LANES)))
    inside = b.and_(
        b.icmp_signed(">=", lanes, splat(b, b.trunc(low, I32))), b.icmp_signed("<", lanes, splat(b, b.trunc(high, I32)))
    )
    chosen = b.select(inside, chosen, constant(VF32, _MINUS_INFINITY))
    before = load(b, state, 0, F32)
    largest = call(b, "llvm.maxnum.f32", F32, before, reduce_max(b, chosen))
    weights = b.select(inside, exp(b, b.fsub(chosen, splat(b, largest))), constant(VF32, 0.0))
    is_first = b.fcmp_ordered("==", before, F32(_MINUS_INFINITY))
    kept = b.select(is_first, constant(VF32, 0.0), exp(b, splat(b, b.fsub(before, largest))))
    store(b, largest, state)
    total = b.fadd(b.fmul(load(b, state, 4, F32), b.extract_element(kept, I32(0))), reduce_add(b, weights))
    store(b, total, state, 4)
    _weigh(b, weights, values, sums, kept, parts)


def _scores(b: ir.IRBuilder, query: ir.Value, keys: ir.Value, parts: ir.Value) -> ir.Value:
    """Dot products with 16 keys, float32 [16]."""

    def part(index: ir.Value, *products: ir.Value) -> list:
        offset = b.mul(index, I64(4 * LANES))
        x = load(b, b.add(query, offset), 0, VF32)
        at, stride = b.add(keys, offset), b.mul(parts, I64(4 * LANES))
        return [
            fma(b, x, load(b, b.add(at, b.mul(stride, I64(place))), 0, VF32), product)
            for place, product in enumerate(products)
        ]

    return _sum_each(b, loop(b, parts, [constant(VF32, 0.0)] * BLOCK, part))


def _sum_each(b: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """Lane i is the sum of vector i's lanes. Each round halves what is left of 16 vectors, two of them to one."""
    for step in (8, 4, 2, 1):
        stays = [lane for lane in range(LANES) if not lane & step]
        left = [lane if lane in stays else lane - step + LANES for lane in range(LANES)]
        right = [lane + step if lane in stays else lane + LANES for lane in range(LANES)]
        vectors = [
            b.fadd(shuffle(b, one, other, left), shuffle(b, one, other, right))
            for one, other in zip(vectors[:step], vectors[step:], strict=True)
        ]
    return vectors[0]


def _weigh(
    b: ir.IRBuilder, weights: ir.Value, values: ir.Value, sums: ir.Value, kept: ir.Value, parts: ir.Value
) -> None:
    """sums = kept * sums + weights @ values"""
    each = [lane_splat(b, weights, place) for place in range(BLOCK)]

    def part(index: ir.Value) -> list:
        offset = b.mul(index, I64(4 * LANES))
        to = b.add(sums, offset)
        total = b.fmul(load(b, to, 0, VF32), kept)
        at, stride = b.add(values, offset), b.mul(parts, I64(4 * LANES))
        for place, weight in enumerate(each):
            total = fma(b, weight, load(b, b.add(at, b.mul(stride, I64(place))), 0, VF32), total)
        store(b, total, to)
        return []

    loop(b, parts, [], part)


@procedure("iiii")
def finish_query(b: ir.IRBuilder, sums: ir.Value, state: ir.Value, parts: ir.Value, out: ir.Value) -> None:
    """The weighted mean, float32 [16 parts]."""
    inverse = splat(b, b.fdiv(F32(1.0), load(b, state, 4, F32)))

    def part(index: ir.Value) -> list:
        offset = b.mul(index, I64(4 * LANES))
        store(b, b.fmul(load(b, b.add(sums, offset), 0, VF32), inverse), b.add(out, offset))
        return []

    loop(b, parts, [], part)


@jit
def plan_blocks(chunks, queries, blocks):
    """Cut each chunk's queries into blocks of at most `queries`; how many there are.

    Args:
        chunks: int64 [3, S], rows of the KV table, tokens in this step, and tokens held with them.
        blocks: int64 [T, 4], filled: row, first token in the step, how many, the first's position.
    """
    number, token = 0, 0
    for place in range(chunks.shape[1]):
        row, length, held = chunks[0, place], chunks[1, place], chunks[2, place]
        for start in range(0, length, queries):
            count = min(queries, length - start)
            blocks[number, 0], blocks[number, 1] = row, token + start
            blocks[number, 2], blocks[number, 3] = count, held - length + start
            number += 1
        token += length
    return number
