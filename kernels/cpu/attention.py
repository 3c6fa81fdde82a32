"""Grouped-query attention over a KV pool that is indexed by token.

A block of queries goes through its tokens in tiles of 32 that begin at multiples of 32, with a running maximum (Milakov
and Gimelshein, 2018): dot products with all keys of a tile, weights, and the weighted sum of the values. A query's
result is the same to the last bit, whether it is computed alone or in a long prompt.

What is multiplied is float32, or pairs of bfloat16 where the CPU multiplies those and the pool is of 2 bytes. Either is
an `element` of 4 bytes here. Keys of a tile are turned, elements [head_dim, 32], so that lanes are tokens and no lanes
need to be summed; values stay, elements [32, head_dim], where a pair is of two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

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
    add_products_of_pairs,
    bf16_pairs,
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
PAIRS = isa.HAS_BF16  # whether a pool of 2 bytes is of bfloat16, multiplied in pairs; it is of float16 otherwise
_MINUS_INFINITY = float("-inf")
_VECTOR = 4 * LANES  # bytes
STATE_BYTES = 16  # of a query's state, see `weigh_row`


class _Elements(NamedTuple):
    """How a pool of one type is read, and its elements are multiplied.

    Attributes:
        load: float32 or pairs [16] of a row, at a place in vectors.
        values: floats that make an element.
        add: z + x y of elements x and y.
    """

    load: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]
    values: int
    add: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]


def _load_float16(b: ir.IRBuilder, row: ir.Value, index: ir.Value) -> ir.Value:
    return b.fpext(load(b, b.add(row, b.mul(index, I64(2 * LANES))), 0, VF16), VF32)


def _load_float32(b: ir.IRBuilder, row: ir.Value, index: ir.Value) -> ir.Value:
    return load(b, b.add(row, b.mul(index, I64(_VECTOR))), 0, VF32)


def _load_pairs(b: ir.IRBuilder, row: ir.Value, index: ir.Value) -> ir.Value:
    return load(b, b.add(row, b.mul(index, I64(_VECTOR))), 0, VI32)


_FLOAT32 = _Elements(_load_float32, 1, fma)
_TWO_BYTES = _Elements(_load_pairs, 2, add_products_of_pairs) if PAIRS else _Elements(_load_float16, 1, fma)


def _for_pool(b: ir.IRBuilder, size: ir.Value, emit: Callable[[_Elements], None]) -> None:
    """`size`: bytes of a value in the pool."""
    with b.if_else(b.icmp_signed("==", size, I64(2))) as (two, four):
        with two:
            emit(_TWO_BYTES)
        with four:
            emit(_FLOAT32)


@procedure("iiiiii")
def gather_keys(
    b: ir.IRBuilder, size: ir.Value, pool: ir.Value, indices: ir.Value, stride: ir.Value, floats: ir.Value,
    out: ir.Value,
) -> None:  # fmt: skip
    """Rows of `floats` at 32 indices, int32, `stride` bytes apart, to elements [..., 32]."""

    def turn(elements: _Elements) -> None:
        for half in range(2):
            rows = _row_addresses(b, pool, b.add(indices, I64(4 * LANES * half)), stride)

            def part(index: ir.Value, rows: list = rows, half: int = half) -> list:
                columns = _transposed(b, [elements.load(b, row, index) for row in rows])
                to = b.add(out, b.mul(index, I64(LANES * 4 * TILE)))
                for place, column in enumerate(columns):
                    store(b, column, to, 4 * TILE * place + _VECTOR * half)
                return []

            loop(b, _vectors(b, floats, elements), [], part)

    _for_pool(b, size, turn)


@procedure("iiiiii")
def gather_values(
    b: ir.IRBuilder, size: ir.Value, pool: ir.Value, indices: ir.Value, stride: ir.Value, floats: ir.Value,
    out: ir.Value,
) -> None:  # fmt: skip
    """Rows of `floats` at 32 indices, int32, `stride` bytes apart, to elements [32 or 16, floats]."""

    def copy(elements: _Elements) -> None:
        for half in range(2):
            rows = _row_addresses(b, pool, b.add(indices, I64(4 * LANES * half)), stride)
            first = LANES // elements.values * half

            def part(index: ir.Value, rows: list = rows, first: int = first) -> list:
                vectors = [elements.load(b, row, index) for row in rows]
                if elements.values == 2:
                    vectors = [each for k in range(0, LANES, 2) for each in _interleaved(b, *vectors[k : k + 2])]
                for place, vector in enumerate(vectors):
                    row, part = place // elements.values, place % elements.values
                    at = b.add(b.mul(floats, I64(4 * (first + row))), b.mul(index, I64(_VECTOR * elements.values)))
                    store(b, vector, b.add(out, at), _VECTOR * part)
                return []

            loop(b, _vectors(b, floats, elements), [], part)

    _for_pool(b, size, copy)


def _vectors(b: ir.IRBuilder, floats: ir.Value, elements: _Elements) -> ir.Value:
    return b.udiv(floats, I64(LANES * elements.values))


def _row_addresses(b: ir.IRBuilder, pool: ir.Value, indices: ir.Value, stride: ir.Value) -> list[ir.Value]:
    return [b.add(pool, b.mul(b.sext(load(b, indices, 4 * place, I32), I64), stride)) for place in range(LANES)]


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


def _interleaved(b: ir.IRBuilder, one: ir.Value, other: ir.Value) -> list[ir.Value]:
    """32 values of two tokens, pairs of neighbours each, as pairs of tokens: two vectors of 16."""
    words = ir.VectorType(ir.IntType(16), 2 * LANES)
    one, other = b.bitcast(one, words), b.bitcast(other, words)
    halves = [[start + place // 2 + 2 * LANES * (place % 2) for place in range(2 * LANES)] for start in (0, LANES)]
    return [b.bitcast(shuffle(b, one, other, lanes), VI32) for lanes in halves]


@procedure("iiii")
def copy_query(b: ir.IRBuilder, size: ir.Value, x: ir.Value, floats: ir.Value, out: ir.Value) -> None:
    """float32 [floats] as elements."""
    _for_pool(b, size, lambda elements: _copy_elements(b, x, floats, out, elements))


def _copy_elements(b: ir.IRBuilder, x: ir.Value, floats: ir.Value, out: ir.Value, elements: _Elements) -> None:
    def part(index: ir.Value) -> list:
        at = b.add(x, b.mul(index, I64(_VECTOR * elements.values)))
        vectors = [load(b, at, _VECTOR * place, VF32) for place in range(elements.values)]
        value = bf16_pairs(b, *vectors) if elements.values == 2 else vectors[0]
        store(b, value, b.add(out, b.mul(index, I64(_VECTOR))))
        return []

    loop(b, _vectors(b, floats, elements), [], part)


@procedure("iiiiiii")
def score_rows(
    b: ir.IRBuilder, size: ir.Value, rows: ir.Value, queries: ir.Value, query_stride: ir.Value, keys: ir.Value,
    floats: ir.Value, scores: ir.Value,
) -> None:  # fmt: skip
    """Dot products of `rows` queries, at most `MOST_ROWS`, with the 32 turned keys: float32 [rows, 32]."""

    def emit(elements: _Elements, count: int) -> None:
        depth = b.udiv(floats, I64(elements.values))
        zeros = [constant(VF32, 0.0)] * (2 * count)
        sums = _products(b, elements, (count, 2), queries, query_stride, keys, I64(4 * TILE), depth, zeros)
        for place, value in enumerate(sums):
            store(b, value, scores, 4 * TILE * (place // 2) + _VECTOR * (place % 2))

    _for_pool(b, size, lambda elements: _for_count(b, rows, partial(emit, elements)))


@procedure("iiiiiiii")
def add_values(
    b: ir.IRBuilder, size: ir.Value, rows: ir.Value, width: ir.Value, weights: ir.Value, values: ir.Value,
    floats: ir.Value, sums: ir.Value, state: ir.Value,
) -> None:  # fmt: skip
    """sums = kept * sums + weights @ values, for `rows` queries and `width` (1 or 2) vectors of their values.

    `weights` and `values` are elements [rows, 32] and [32, floats], `sums` float32 [rows, floats]; `state` as in
    `weigh_row`.
    """
    stride = b.mul(floats, I64(4))

    def emit(elements: _Elements, vectors: int, count: int) -> None:
        to = [(b.add(sums, b.mul(stride, I64(row))), vector) for row in range(count) for vector in range(vectors)]
        kept = [splat(b, load(b, state, STATE_BYTES * row + 8, F32)) for row in range(count)]
        before = [
            b.fmul(load(b, at, _VECTOR * vector, VF32), kept[place // vectors]) for place, (at, vector) in enumerate(to)
        ]
        depth = I64(TILE // elements.values)
        shape = count, vectors
        after = _products(b, elements, shape, weights, I64(4 * TILE), values, stride, depth, before)
        for (at, vector), value in zip(to, after, strict=True):
            store(b, value, at, _VECTOR * vector)

    def emit_widths(elements: _Elements) -> None:
        for vectors in (1, 2):
            with b.if_then(b.icmp_signed("==", width, I64(vectors))):
                _for_count(b, rows, partial(emit, elements, vectors))

    _for_pool(b, size, emit_widths)


def _for_count(b: ir.IRBuilder, rows: ir.Value, emit: Callable[[int], None]) -> None:
    for count in range(1, MOST_ROWS + 1):
        with b.if_then(b.icmp_signed("==", rows, I64(count))):
            emit(count)


def _products(
    b: ir.IRBuilder, elements: _Elements, shape: tuple[int, int], left: ir.Value, left_stride: ir.Value,
    right: ir.Value, right_stride: ir.Value, depth: ir.Value, sums: list[ir.Value],
) -> list[ir.Value]:  # fmt: skip
    """`sums` [rows * vectors] plus elements [rows, depth] @ [depth, 16 vectors].

    Even and odd depths are summed apart, and then together: a sum that waits for nothing but itself would be slow.
    """
    rows, vectors = shape

    def add(index: ir.Value, totals: Sequence[ir.Value]) -> list[ir.Value]:
        at = b.add(right, b.mul(right_stride, index))
        columns = [load(b, at, _VECTOR * vector, _kind(elements)) for vector in range(vectors)]
        out = []
        for row in range(rows):
            place = b.add(b.add(left, b.mul(left_stride, I64(row))), b.mul(index, I64(4)))
            value = splat(b, load(b, place, 0, _kind(elements).element))
            for vector in range(vectors):
                out.append(elements.add(b, value, columns[vector], totals[row * vectors + vector]))
        return out

    def step(index: ir.Value, *totals: ir.Value) -> list:
        even = b.mul(index, I64(2))
        half = rows * vectors
        return [*add(even, totals[:half]), *add(b.add(even, I64(1)), totals[half:])]

    zeros = [constant(VF32, 0.0)] * len(sums)
    both = loop(b, b.udiv(depth, I64(2)), [*sums, *zeros], step)
    return [b.fadd(even, odd) for even, odd in zip(both[: len(sums)], both[len(sums) :], strict=True)]


def _kind(elements: _Elements) -> ir.VectorType:
    return VI32 if elements.values == 2 else VF32


@procedure("iiiiif")
def weigh_row(
    b: ir.IRBuilder, size: ir.Value, scores: ir.Value, state: ir.Value, low: ir.Value, high: ir.Value, cap: ir.Value
) -> None:
    """Scores of a query, float32 [32], to weights in place, 0 outside the tokens `low` up to `high`, at least one.

    `state`, float32 [4]: the largest score so far, the sum of the weights, and by what earlier sums are multiplied now.
    `cap`: scores stay within it by tanh; 0 is none.
    """
    with b.if_then(b.fcmp_ordered("!=", cap, F32(0.0))):
        for half in range(2):
            store(b, soft_cap(b, load(b, scores, _VECTOR * half, VF32), cap), scores, _VECTOR * half)
    inside = [_between(b, half * LANES, low, high) for half in range(2)]
    minus_infinity = constant(VF32, _MINUS_INFINITY)
    chosen = [b.select(inside[half], load(b, scores, _VECTOR * half, VF32), minus_infinity) for half in range(2)]
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
        store(b, part, scores, _VECTOR * half)
    if PAIRS:
        with b.if_then(b.icmp_signed("==", size, I64(2))):
            store(b, bf16_pairs(b, *weights), scores)


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
        offset = b.mul(index, I64(_VECTOR))
        store(b, b.fmul(load(b, b.add(sums, offset), 0, VF32), inverse), b.add(out, offset))
        return []

    loop(b, parts, [], part)


@procedure("iii")
def start_query(b: ir.IRBuilder, out: ir.Value, parts: ir.Value, state: ir.Value) -> None:
    """A query's sums and state at the start."""

    def part(index: ir.Value) -> list:
        store(b, constant(VF32, 0.0), b.add(out, b.mul(index, I64(_VECTOR))))
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
