"""A decoder's step as a list of operations, which a team of threads runs without returning to Python.

An operation is a row of `WIDTH` int64, its kind and what `kernels.cpu.operations` says of it: addresses, sizes, float32
bits. A step is `STEP_WORDS` int64. All buffers belong to the program; only the step's words change from step to step.

An operation's work is divided into items: rows for what works row by row, panels for products, blocks of
queries for attention, or a block and one of its key-value heads where there are few.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.attention import (
    MOST_ROWS,
    STATE_BYTES,
    TILE,
    add_values,
    copy_query,
    finish_query,
    gather_keys,
    gather_values,
    score_rows,
    start_query,
    weigh_row,
)  # fmt: skip
from kernels.cpu.compiled import jit
from kernels.cpu.heads import fill_rotation, norm_head, rotate, scale_head, store_heads
from kernels.cpu.ir import LANES, float_of_bits, load_int32, load_int64, prefetch, store_float, store_int32
from kernels.cpu.matmul import GROUP, multiply
from kernels.cpu.pack import unpack_row
from kernels.cpu.rows import activate_row, add_norm_row, norm_row, quantise_row, soft_cap_row

WIDTH = 16

# Words of a step. T tokens, L of which are given logits.
TOKENS, LOGITS, IDS, POSITIONS, KV_INDEX, LOGITS_INDEX = 0, 1, 2, 3, 4, 5
KV_TABLE, KV_TABLE_STRIDE, POOLS, POOL_BYTES, BLOCKS, NUM_BLOCKS, SCRATCH, SCRATCH_BYTES = 6, 7, 8, 9, 10, 11, 12, 13
HEAD_PARTS = 14  # into how many items a block's key-value heads are divided: 1, or as many as there are
STEP_WORDS = 16

# Words of a block of queries: row of the KV table, first token in the step, how many, the first's position.
BLOCK_WORDS = 4

EMBED, ROTATION, NORM, ADD_NORM, LINEAR, HEADS, ATTEND, QUANTISE, ACTIVATE, SOFT_CAP = range(10)


@jit
def count_items(op, step):
    kind = op[0]
    if kind == LINEAR:
        return op[4]
    if kind == ATTEND:
        return step[NUM_BLOCKS] * step[HEAD_PARTS]
    if kind == SOFT_CAP or (kind == NORM and op[8]):
        return step[LOGITS]
    return step[TOKENS]


@jit
def run_items(op, step, first, last, thread):
    """Items `first` up to `last` of an operation."""
    kind = op[0]
    if kind == LINEAR:
        rows = step[LOGITS] if op[11] else step[TOKENS]
        multiply(op[1], op[2], op[3], first, last, op[6], op[7], op[5], op[8], op[9], rows, op[10])
    elif kind == ATTEND:
        for item in range(first, last):
            _attend(op, step, item, step[SCRATCH] + thread * step[SCRATCH_BYTES])
    else:
        for row in range(first, last):
            _run_row(op, step, row)


@jit
def _run_row(op, step, row):
    kind = op[0]
    if kind == NORM:
        place = load_int64(step[LOGITS_INDEX] + 8 * row) if op[8] else row
        groups = op[5]
        codes, scales = op[6] + row * groups * GROUP, op[7] + row * groups * 8
        norm_row(op[1] + place * op[2], op[3], groups, float_of_bits(op[4]), codes, scales)
    elif kind == HEADS:
        _prepare_heads(op, step, row)
    elif kind == QUANTISE:
        quantise_row(op[1] + row * op[2], op[3], op[4] + row * op[3] * GROUP, op[5] + row * op[3] * 8)
    elif kind == ACTIVATE:
        gate, groups = op[2] + row * op[3], op[4]
        activate_row(
            op[1], gate, gate + groups * GROUP * 4, groups, op[5] + row * groups * GROUP, op[6] + row * groups * 8
        )
    elif kind == ADD_NORM:
        add_norm_row(op[1] + row * op[2], op[3], op[5], float_of_bits(op[4]), op[6] + row * op[7])
    elif kind == EMBED:
        token = load_int64(step[IDS] + 8 * row)
        unpack_row(op[1], op[2], op[3], token, float_of_bits(op[4]), op[5] + row * op[6])
    elif kind == ROTATION:
        position = load_int64(step[POSITIONS] + 8 * row)
        fill_rotation(position, op[1], op[2], float_of_bits(op[3]), op[4] + row * op[2] * 8)
    else:
        soft_cap_row(op[1] + row * op[2], op[3], float_of_bits(op[4]))


@jit
def _prepare_heads(op, step, row):
    queries, keys, size, rotation = op[3], op[4], op[5], op[8]
    heads = op[1] + row * op[2]
    for head in range(queries + keys):
        at = heads + head * size * 4
        if op[6]:
            norm_head(at, op[6] + head * size * 4, size, float_of_bits(op[7]))
        if rotation:
            rotate(at, rotation + row * op[9] * 8, op[9])
        if head < queries:
            scale_head(at, size, float_of_bits(op[10]))
    token = load_int64(step[KV_INDEX] + 8 * row)
    pool = step[POOLS] + op[11] * step[POOL_BYTES] + token * 2 * keys * size * op[12]
    store_heads(op[12], heads + queries * size * 4, 2 * keys * size, pool)


@jit
def _attend(op, step, item, scratch):
    """A block of queries over some of the key-value heads. Tokens beyond the last query's position are not looked at.

    Heads take turns within a tile, so that all that a token has in the pool is read at one time.
    """
    group, floats, window, kv_bytes = op[3] // op[4], op[5], op[8], op[11]
    heads = op[4] // step[HEAD_PARTS]
    first_head = item % step[HEAD_PARTS] * heads
    place = step[BLOCKS] + item // step[HEAD_PARTS] * BLOCK_WORDS * 8
    row, first = load_int64(place), load_int64(place + 8)
    count, position = load_int64(place + 16), load_int64(place + 24)
    pool = step[POOLS] + op[10] * step[POOL_BYTES] + first_head * floats * kv_bytes
    table = step[KV_TABLE] + row * step[KV_TABLE_STRIDE]
    rows, row_bytes = count * group, floats * 4
    keys, values = scratch, scratch + TILE * row_bytes
    queries = values + TILE * row_bytes
    sums = queries + heads * rows * row_bytes
    state = sums + heads * rows * row_bytes
    scores = state + heads * rows * STATE_BYTES
    for one in range(heads * rows):
        query = op[1] + _place(first, first_head, one, rows, group, op[2], row_bytes)
        copy_query(kv_bytes, query, floats, queries + one * row_bytes)
        start_query(sums + one * row_bytes, floats // LANES, state + one * STATE_BYTES)
    start = 0 if window == 0 else max(0, position - window + 1) // TILE * TILE
    for tile in range(start, position + count, TILE):
        for head in range(heads):
            one = head * rows
            _fetch(op, table, pool, tile + TILE, position + count, head, heads)
            _gather(op, table, pool + head * floats * kv_bytes, tile, position + count, keys, values)
            _score(kv_bytes, rows, floats, queries + one * row_bytes, keys, scores)
            _weigh(op, rows, group, position, tile, scores, state + one * STATE_BYTES)
            _add_values(kv_bytes, rows, floats, scores, values, sums + one * row_bytes, state + one * STATE_BYTES)
    for one in range(heads * rows):
        out = op[6] + _place(first, first_head, one, rows, group, op[7], row_bytes)
        finish_query(sums + one * row_bytes, state + one * STATE_BYTES, floats // LANES, out)


@jit
def _place(first, first_head, one, rows, group, stride, row_bytes):
    """Where a query stands: those of a block go by key-value head, then by token, then by the head within its group."""
    head = (first_head + one // rows) * group + one % group
    return (first + one % rows // group) * stride + head * row_bytes


@jit
def _fetch(op, table, pool, tile, end, part, parts):
    """Of the next tile's tokens the share `part`, into the cache: all at once would be more than can be under way."""
    size = op[5] * op[11]
    heads_bytes = op[4] * size
    for i in range(tile + TILE * part // parts, min(tile + TILE * (part + 1) // parts, end)):
        token = pool + load_int32(table + 4 * i) * 2 * heads_bytes
        for line in range(0, parts * size, 64):
            prefetch(token + line)
            prefetch(token + heads_bytes + line)


@jit
def _score(kv_bytes, rows, floats, queries, keys, scores):
    for one in range(0, rows, MOST_ROWS):
        some = min(MOST_ROWS, rows - one)
        score_rows(kv_bytes, some, queries + one * floats * 4, floats * 4, keys, floats, scores + one * TILE * 4)


@jit
def _add_values(kv_bytes, rows, floats, scores, values, sums, state):
    for one in range(0, rows, MOST_ROWS):
        some, weights, states = min(MOST_ROWS, rows - one), scores + one * TILE * 4, state + one * STATE_BYTES
        for start in range(0, floats, 2 * LANES):
            width = min(2, (floats - start) // LANES)
            to = sums + (one * floats + start) * 4
            add_values(kv_bytes, some, width, weights, values + start * 4, floats, to, states)


@jit
def _weigh(op, rows, group, position, tile, scores, state):
    """A query that looks at none of the tile's tokens keeps what it has."""
    for one in range(rows):
        token = position + one // group
        high = min(TILE, token + 1 - tile)
        low = 0 if op[8] == 0 else max(0, token - op[8] + 1 - tile)
        if low < high:
            weigh_row(op[11], scores + one * TILE * 4, state + one * STATE_BYTES, low, high, float_of_bits(op[9]))
        else:
            for i in range(TILE):
                store_float(scores + one * TILE * 4 + 4 * i, np.float32(0.0))
            store_float(state + one * STATE_BYTES + 8, np.float32(1.0))


@jit
def _gather(op, table, pool, tile, end, keys, values):
    """Keys and values of a tile; a place beyond the sequence's end repeats its last token, and has no weight."""
    floats, kv_bytes = op[5], op[11]
    heads_bytes = op[4] * floats * kv_bytes
    indices = table + 4 * tile
    if end - tile < TILE:
        indices = values + TILE * floats * 4 - 4 * TILE  # in what is overwritten once it has been read
        for i in range(TILE):
            store_int32(indices + 4 * i, load_int32(table + 4 * min(tile + i, end - 1)))
    gather_keys(kv_bytes, pool, indices, 2 * heads_bytes, floats, keys)
    gather_values(kv_bytes, pool + heads_bytes, indices, 2 * heads_bytes, floats, values)
