"""Grouped-query attention over a KV pool that is indexed by token.

A block of queries goes through its tokens in tiles of 32 that begin at multiples of 32, with a running maximum (Milakov
and Gimelshein, 2018): dot products with all keys of a tile, weights, and the weighted sum of the values. A query's
result is the same to the last bit, whether it is computed alone or in a long prompt.

Keys of a tile are turned, float32 [head_dim, 32], so that lanes are tokens and no lanes need to be summed.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from kernels.cpu import isa
from kernels.cpu.compiled import jit
from kernels.cpu.ir import (
    F32,
    I32,
    I64,
    LANES,
    VF16,
    VF32,
    VI32,
    constant,
    exp,
    fma,
    load,
    loop,
    maximum,
    procedure,
    reduce_add,
    reduce_max,
    shuffle,
    splat,
    store,
)  # fmt: skip
from kernels.cpu.rows import soft_cap

TILE = 2 * LANES  # tokens
MOST_ROWS = 6 if isa.HAS_AVX512 else 2  # of queries at once, as the number of registers allows
_MINUS_INFINITY = float("-inf")
_FLOATS = 4 * LANES  # bytes of a vector


@procedure("iiiiii")
def gather_keys(
    b: ir.IRBuilder, size: ir.Value, pool: ir.Value, indices: ir.Value, stride: ir.Value, parts: ir.Value,
    out: ir.Value,
) -> None:  # fmt: skip
    """Rows of [16 parts] at 32 indices, int32, `stride` bytes apart, turned to float32 [16 parts, 32].

    `size`: 2 for a pool of float16, 4 for one of float32.
    """

    def turn(kind: ir.VectorType) -> None:
        for half in range(2):
            rows = _row_addresses(b, pool, b.add(indices, I64(4 * LANES * half)), stride)

            def part(index: ir.Value, rows: list = rows, half: int = half) -> list:
                columns = _transposed(b, [_load_part(b, row, index, kind) for row in rows])
                to = b.add(out, b.mul(index, I64(LANES * 4 * TILE)))
                for place, column in enumerate(columns):
                    store(b, column, to, 4 * TILE * place + _FLOATS * half)
                return []

            loop(b, parts, [], part)

    _either_size(b, size, turn)


@procedure("iiiiii")
def gather_values(
    b: ir.IRBuilder, size: ir.Value, pool: ir.Value, indices: ir.Value, stride: ir.Value, parts: ir.Value,
    out: ir.Value,
) -> None:  # fmt: skip
    """As `gather_keys`, to float32 [32, 16 parts]."""

    def copy(kind: ir.VectorType) -> None:
        for half in range(2):
            rows = _row_addresses(b, pool, b.add(indices, I64(4 * LANES * half)), stride)

            def part(index: ir.Value, rows: list = rows, half: int = half) -> list:
                for place, row in enumerate(rows):
                    at = b.add(b.mul(parts, I64(place + LANES * half)), index)
                    store(b, _load_part(b, row, index, kind), b.add(out, b.mul(at, I64(_FLOATS))))
                return []

            loop(b, parts, [], part)

    _either_size(b, size, copy)


def _either_size(b: ir.IRBuilder, size: ir.Value, emit: Callable[[ir.VectorType], None]) -> None:
    with b.if_else(b.icmp_signed("==", size, I64(2))) as (halves, floats):
        with halves:
            emit(VF16)
        with floats:
            emit(VF32)


def _row_addresses(b: ir.IRBuilder, pool: ir.Value, indices: ir.Value, stride: ir.Value) -> list[ir.Value]:
    return [b.add(pool, b.mul(b.sext(load(b, indices, 4 * place, I32), I64), stride)) for place in range(LANES)]


def _load_part(b: ir.IRBuilder, row: ir.Value, index: ir.Value, kind: ir.VectorType) -> ir.Value:
    size = 2 if kind is VF16 else 4
    value = load(b, b.add(row, b.mul(index, I64(size * LANES))), 0, kind)
    return b.fpext(value, VF32) if kind is VF16 else value


def _transposed(b: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """16 vectors of 16 lanes: blocks off the diagonal change places, of half the size each time."""
    for step in (8, 4, 2, 1):
        first = [lane if not lane & step else lane - step + LANES for lane in range(LANES)]
        second = [lane + step if not lane & step else lane + LANES for lane in range(LANES)]
        new = list(rows)
        for place in range(LANES):
            if not place & step:
                pair = rows[place], rows[place + step]
                new[place], new[place + step] = shuffle(b, *pair, first), shuffle(b, *pair, second)
        rows = new
    return rows


@procedure("iiiiiii")
def score_rows(
    b: ir.IRBuilder, rows: ir.Value, queries: ir.Value, query_stride: ir.Value, keys: ir.Value, depth: ir.Value,
    scores: ir.Value, score_stride: ir.Value,
) -> None:  # fmt: skip
    """Dot products of `rows` queries, at most `MOST_ROWS`, with the 32 turned keys."""
    zero = constant(VF32, 0.0)

    def emit(count: int) -> None:
        sums = _products(b, count, 2, queries, query_stride, keys, I64(4 * TILE), depth, [zero] * (2 * count))
        for place, value in enumerate(sums):
            to = b.add(scores, b.mul(score_stride, I64(place // 2)))
            store(b, value, to, _FLOATS * (place % 2))

    _for_count(b, rows, emit)


@procedure("iiiiiii")
def add_values(
    b: ir.IRBuilder, rows: ir.Value, weights: ir.Value, values: ir.Value, parts: ir.Value, sums: ir.Value,
    state: ir.Value, width: ir.Value,
) -> None:  # fmt: skip
    """sums = kept * sums + weights @ values, for `rows` queries and `width` (1 or 2) vectors of their values.

    `weights` and `values` are [rows, 32] and [32, 16 parts]; `state` as in `weigh_row`.
    """
    stride = b.mul(parts, I64(_FLOATS))

    def emit(count: int, vectors: int) -> None:
        kept = [splat(b, load(b, state, 16 * row + 8, F32)) for row in range(count)]
        to = [(b.add(sums, b.mul(stride, I64(row))), vector) for row in range(count) for vector in range(vectors)]
        before = [
            b.fmul(load(b, at, _FLOATS * vector, VF32), kept[place // vectors]) for place, (at, vector) in enumerate(to)
        ]
        after = _products(b, count, vectors, weights, I64(4 * TILE), values, stride, I64(TILE), before)
        for (at, vector), value in zip(to, after, strict=True):
            store(b, value, at, _FLOATS * vector)

    with b.if_else(b.icmp_signed("==", width, I64(2))) as (two, one):
        with two:
            _for_count(b, rows, lambda count: emit(count, 2))
        with one:
            _for_count(b, rows, lambda count: emit(count, 1))


def _for_count(b: ir.IRBuilder, rows: ir.Value, emit: Callable[[int], None]) -> None:
    for count in range(1, MOST_ROWS + 1):
        with b.if_then(b.icmp_signed("==", rows, I64(count))):
            emit(count)


def _products(
    b: ir.IRBuilder, rows: int, vectors: int, left: ir.Value, left_stride: ir.Value, right: ir.Value,
    right_stride: ir.Value, depth: ir.Value, sums: list[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """`sums` [rows * vectors] plus float32 [rows, depth] @ [depth, 16 vectors], one depth after the other."""

    def step(index: ir.Value, *totals: ir.Value) -> list:
        at = b.add(right, b.mul(right_stride, index))
        columns = [load(b, at, _FLOATS * vector, VF32) for vector in range(vectors)]
        out = []
        for row in range(rows):
            place = b.add(b.add(left, b.mul(left_stride, I64(row))), b.mul(index, I64(4)))
            value = splat(b, load(b, place, 0, F32))
            out += [fma(b, value, columns[vector], totals[row * vectors + vector]) for vector in range(vectors)]
        return out

    return loop(b, depth, sums, step)


@procedure("iiiif")
def weigh_row(b: ir.IRBuilder, scores: ir.Value, state: ir.Value, low: ir.Value, high: ir.Value, cap: ir.Value) -> None:
    """Scores of a query, float32 [32], to weights in place, 0 outside the tokens `low` up to `high`, at least one.

    `state`, float32 [4]: the largest score so far, the sum of the weights, and by what earlier sums are multiplied now.
    `cap`: scores stay within it by tanh; 0 is none.
    """
    with b.if_then(b.fcmp_ordered("!=", cap, F32(0.0))):
        for half in range(2):
            store(b, soft_cap(b, load(b, scores, _FLOATS * half, VF32), cap), scores, _FLOATS * half)
    inside = [_between(b, half * LANES, low, high) for half in range(2)]
    minus_infinity = constant(VF32, _MINUS_INFINITY)
    chosen = [b.select(inside[half], load(b, scores, _FLOATS * half, VF32), minus_infinity) for half in range(2)]
    before = load(b, state, 0, F32)
    largest = maximum(b, before, reduce_max(b, maximum(b, *chosen)))
    top = splat(b, largest)
    weights = [
        b.select(mask, exp(b, b.fsub(part, top)), constant(VF32, 0.0))
        for mask, part in zip(inside, chosen, strict=True)
    ]
    kept = _kept(b, before, largest)
    total = b.fadd(b.fmul(load(b, state, 4, F32), kept), reduce_add(b, b.fadd(*weights)))
    for place, value in enumerate((largest, total, kept)):
        store(b, value, state, 4 * place)
    for half, part in enumerate(weights):
        store(b, part, scores, _FLOATS * half)


def _kept(b: ir.IRBuilder, before: ir.Value, largest: ir.Value) -> ir.Value:
    """exp(before - largest), which is 1 most of the time."""
    start = b.block
    with b.if_then(b.fcmp_ordered("<", before, largest)):
        is_first = b.fcmp_ordered("==", before, F32(_MINUS_INFINITY))
        smaller = b.extract_element(exp(b, splat(b, b.fsub(before, largest))), I32(0))
        smaller = b.select(is_first, F32(0.0), smaller)
        grown = b.block
    kept = b.phi(F32)
    kept.add_incoming(F32(1.0), start)
    kept.add_incoming(smaller, grown)
    return kept


def _between(b: ir.IRBuilder, start: int, low: ir.Value, high: ir.Value) -> ir.Value:
    lanes = ir.Constant(VI32, [start + lane for lane in range(LANES)])
    limits = [splat(b, b.trunc(limit, I32)) for limit in (low, high)]
    return b.and_(b.icmp_signed(">=", lanes, limits[0]), b.icmp_signed("<", lanes, limits[1]))


@procedure("iiii")
def finish_query(b: ir.IRBuilder, sums: ir.Value, state: ir.Value, parts: ir.Value, out: ir.Value) -> None:
    """The weighted mean, float32 [16 parts]."""
    inverse = splat(b, b.fdiv(F32(1.0), load(b, state, 4, F32)))

    def part(index: ir.Value) -> list:
        offset = b.mul(index, I64(_FLOATS))
        store(b, b.fmul(load(b, b.add(sums, offset), 0, VF32), inverse), b.add(out, offset))
        return []

    loop(b, parts, [], part)


@procedure("iii")
def copy_floats(b: ir.IRBuilder, x: ir.Value, parts: ir.Value, out: ir.Value) -> None:
    """float32 [16 parts]."""

    def part(index: ir.Value) -> list:
        offset = b.mul(index, I64(_FLOATS))
        store(b, load(b, b.add(x, offset), 0, VF32), b.add(out, offset))
        return []

    loop(b, parts, [], part)


@procedure("iii")
def clear_floats(b: ir.IRBuilder, out: ir.Value, parts: ir.Value, state: ir.Value) -> None:
    """A query's sums and state at the start."""

    def part(index: ir.Value) -> list:
        store(b, constant(VF32, 0.0), b.add(out, b.mul(index, I64(_FLOATS))))
        return []

    loop(b, parts, [], part)
    for place, value in enumerate((_MINUS_INFINITY, 0.0, 1.0)):
        store(b, F32(value), state, 4 * place)


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
