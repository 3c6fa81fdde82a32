"""A decoder's step as a list of operations, which a team of threads runs without returning to Python.

An operation is a row of `WIDTH` int64, its kind and what `kernels.cpu.operations` says of it: addresses, sizes, float32
bits. A step is `STEP_WORDS` int64. All buffers belong to the program; only the step's words change from step to step.

An operation's work is divided into items: rows for what works row by row, panels for products, pairs of a block of
queries and a key-value head for attention.
"""

from __future__ import annotations

import numpy as np

from kernels.cpu.attention import BLOCK, attend_block, finish_query, gather_block
from kernels.cpu.compiled import jit
from kernels.cpu.heads import fill_rotation, norm_head, rotate, scale_head, store_floats, store_halves
from kernels.cpu.ir import LANES, float_of_bits, load_int32, load_int64, store_float, store_int32
from kernels.cpu.matmul import GROUP, multiply
from kernels.cpu.pack import unpack_row
from kernels.cpu.rows import activate_row, add_norm_row, norm_row, quantise_row, soft_cap_row

WIDTH = 16

# Words of a step. T tokens, L of which are given logits.
TOKENS, LOGITS, IDS, POSITIONS, KV_INDEX, LOGITS_INDEX = 0, 1, 2, 3, 4, 5
KV_TABLE, KV_TABLE_STRIDE, POOLS, POOL_BYTES, BLOCKS, NUM_BLOCKS, SCRATCH, SCRATCH_BYTES = 6, 7, 8, 9, 10, 11, 12, 13
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
        return step[NUM_BLOCKS] * op[4]
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
            _attend(op, step, item // op[4], item % op[4], step[SCRATCH] + thread * step[SCRATCH_BYTES])
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
    if op[12] == 2:
        store_halves(heads + queries * size * 4, 2 * keys * size // LANES, pool)
    else:
        store_floats(heads + queries * size * 4, 2 * keys * size // LANES, pool)


@jit
def _attend(op, step, block, head, scratch):
    """A block of queries over the keys of one head. Tokens beyond the last query's position are not looked at."""
    group, size, window = op[3] // op[4], op[5], op[8]
    parts, head_bytes = size // LANES, size * 4
    place = step[BLOCKS] + block * BLOCK_WORDS * 8
    row, first, count, position = (
        load_int64(place),
        load_int64(place + 8),
        load_int64(place + 16),
        load_int64(place + 24),
    )
    pool = step[POOLS] + op[10] * step[POOL_BYTES] + head * size * op[11]
    table = step[KV_TABLE] + row * step[KV_TABLE_STRIDE]
    keys, values = scratch, scratch + BLOCK * head_bytes
    sums, state = values + BLOCK * head_bytes, values + BLOCK * head_bytes + count * group * head_bytes
    queries = op[1] + first * op[2] + head * group * head_bytes
    _clear(sums, state, count * group, parts)
    start = 0 if window == 0 else max(0, position - window + 1) // BLOCK * BLOCK
    for block_start in range(start, position + count, BLOCK):
        _gather(op, table, pool, block_start, min(BLOCK, position + count - block_start), parts, keys, values)
        for token in range(count):
            high = min(BLOCK, position + token + 1 - block_start)
            low = 0 if window == 0 else max(0, position + token - window + 1 - block_start)
            if low < high:
                for i in range(group):
                    query = queries + token * op[2] + i * head_bytes
                    one = token * group + i
                    attend_block(
                        query, keys, values, sums + one * head_bytes, state + one * 8, parts, low, high,
                        float_of_bits(op[9]),
                    )  # fmt: skip
    for token in range(count):
        for i in range(group):
            one = token * group + i
            out = op[6] + (first + token) * op[7] + (head * group + i) * head_bytes
            finish_query(sums + one * head_bytes, state + one * 8, parts, out)


@jit
def _clear(sums, state, count, parts):
    for i in range(count * parts * LANES):
        store_float(sums + 4 * i, np.float32(0.0))
    for i in range(count):
        store_float(state + 8 * i, np.float32(-np.inf))
        store_float(state + 8 * i + 4, np.float32(0.0))


@jit
def _gather(op, table, pool, start, count, parts, keys, values):
    """Keys and values of a block; a place beyond the sequence's end repeats its last token, and has no weight."""
    heads_bytes = op[4] * op[5] * op[11]
    indices = table + 4 * start
    if count < BLOCK:
        indices = values + BLOCK * parts * LANES * 4 - 4 * BLOCK  # overwritten by the values, once it has been read
        for i in range(BLOCK):
            store_int32(indices + 4 * i, load_int32(table + 4 * (start + min(i, count - 1))))
    gather_block(op[11], pool, indices, 2 * heads_bytes, parts, keys)
    gather_block(op[11], pool + heads_bytes, indices, 2 * heads_bytes, parts, values)
