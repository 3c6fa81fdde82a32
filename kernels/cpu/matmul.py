"""Products with weights that are kept as 4- or 8-bit codes, in groups of 32 along the input.

A weight is `scale * code + low`, as in GGUF's Q4_1; with 8 bits `low` is -128 scales. Activations are rounded to 8-bit
codes too, for each row and group by itself, so that an outlier spoils no more than its own group. Sums in a group are
exact; groups are summed in order, in float32. So a row's result is the same to the last bit, whatever else is computed
with it.

Packed weights are panels of 16 outputs. A panel has for each group: codes, 4 inputs of an output side by side, then 16
scales and, with 4 bits, 16 lows, float16. With 4 bits a byte's low half belongs to the turn before its high half's.
"""

from __future__ import annotations

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
    fma,
    load,
    loop,
    prefetch_line,
    procedure,
    splat,
    store,
)

GROUP = 32
TURNS = 8  # of 4 inputs each
PANEL = LANES
CODE_BYTES = {4: PANEL * GROUP // 2, 8: PANEL * GROUP}
GROUP_BYTES = {4: CODE_BYTES[4] + 4 * PANEL, 8: CODE_BYTES[8] + 2 * PANEL}
_GROUP_BYTES_4, _GROUP_BYTES_8 = GROUP_BYTES[4], GROUP_BYTES[8]  # compiled code reads no dictionary
_MOST_ROWS = isa.MOST_ROWS


# How many rows of activations one pass over a panel serves, as the number of registers allows.
ROWS = [rows for rows in (8, 4, 2, 1) if rows <= isa.MOST_ROWS]


@procedure("iiiiiiiiiiii")
def _tile(b: ir.IRBuilder, bits: ir.Value, rows: ir.Value, *args: ir.Value) -> None:
    """`rows` rows of activations, one of `ROWS`, times one panel."""
    for known_bits in CODE_BYTES:
        for known_rows in ROWS:
            same = b.and_(b.icmp_signed("==", bits, I64(known_bits)), b.icmp_signed("==", rows, I64(known_rows)))
            with b.if_then(same):
                _emit_tile(b, known_bits, known_rows, *args)


def _emit_tile(
    b: ir.IRBuilder, bits: int, rows: int, weights: ir.Value, bias: ir.Value, codes: ir.Value, code_stride: ir.Value,
    scales: ir.Value, scale_stride: ir.Value, groups: ir.Value, out: ir.Value, out_stride: ir.Value, adds: ir.Value,
) -> None:  # fmt: skip
    products = isa.products(bits)
    ahead = b.mul(groups, I64(GROUP_BYTES[bits]))  # the next panel

    def add_group(index: ir.Value, *totals: ir.Value) -> list[ir.Value]:
        at = b.add(weights, b.mul(index, I64(GROUP_BYTES[bits])))
        for line in range(0, GROUP_BYTES[bits], 64):
            prefetch_line(b, b.add(at, b.add(ahead, I64(line))))
        x = _rows(b, codes, index, GROUP, code_stride, rows)
        sums = [products.start() for _ in range(rows)]
        for turn in range(TURNS):
            weight = _weight_codes(b, at, turn, bits)
            for row in range(rows):
                sums[row] = products.add(b, sums[row], weight, splat(b, load(b, x[row], 4 * turn, I32)))
        dots = [b.sitofp(products.finish(b, each), VF32) for each in sums]
        return _scaled(b, bits, at, dots, _rows(b, scales, index, 8, scale_stride, rows), list(totals))

    results = loop(b, groups, [load(b, bias, 0, VF32)] * rows, add_group)
    to = _rows(b, out, I64(0), 0, out_stride, rows)
    with b.if_else(b.icmp_signed("!=", adds, I64(0))) as (then, otherwise):
        with then:
            for place, result in zip(to, results, strict=True):
                store(b, b.fadd(load(b, place, 0, VF32), result), place)
        with otherwise:
            for place, result in zip(to, results, strict=True):
                store(b, result, place)


def _rows(b: ir.IRBuilder, base: ir.Value, index: ir.Value, size: int, stride: ir.Value, rows: int) -> list[ir.Value]:
    """Addresses of the entry `index`, `size` bytes each, in `rows` rows."""
    first = b.add(base, b.mul(index, I64(size)))
    return [b.add(first, b.mul(stride, I64(row))) for row in range(rows)]


def _scaled(
    b: ir.IRBuilder, bits: int, at: ir.Value, dots: list[ir.Value], scales: list[ir.Value], totals: list[ir.Value]
) -> list[ir.Value]:
    """`totals` with one group's sums of codes, brought to their scales."""
    scale = b.fpext(load(b, at, CODE_BYTES[bits], VF16), VF32)
    low = b.fpext(load(b, at, CODE_BYTES[bits] + 2 * PANEL, VF16), VF32) if bits == 4 else None
    out = []
    for dot, place, total in zip(dots, scales, totals, strict=True):
        step, summed = splat(b, load(b, place, 0, F32)), splat(b, load(b, place, 4, F32))
        if low is None:
            dot = fma(b, dot, step, b.fmul(summed, constant(VF32, -128.0)))
            out.append(fma(b, dot, scale, total))
        else:
            out.append(fma(b, dot, b.fmul(scale, step), fma(b, low, summed, total)))
    return out


def _weight_codes(b: ir.IRBuilder, at: ir.Value, turn: int, bits: int) -> ir.Value:
    if bits == 8:
        return load(b, at, 4 * PANEL * turn, VI32)
    pair = load(b, at, 4 * PANEL * (turn // 2), VI32)
    return b.and_(b.lshr(pair, constant(VI32, 4)) if turn % 2 else pair, constant(VI32, 0x0F0F0F0F))


@jit
def multiply(bits, weights, bias, first, last, codes, scales, groups, out, out_stride, rows, adds):
    """Panels `first` up to `last` of all `rows` rows, with `adds` added to what is in `out`. Strides are in bytes.

    `codes` and `scales` are what `kernels.cpu.rows` makes: int8 [rows, 32 groups], float32 [rows, groups, 2].
    """
    for panel in range(first, last):
        weight = weights + panel * groups * (_GROUP_BYTES_4 if bits == 4 else _GROUP_BYTES_8)
        row = 0
        while row < rows:
            left = rows - row
            size = _MOST_ROWS if left >= _MOST_ROWS else 4 if left >= 4 else 2 if left >= 2 else 1
            _tile(
                bits, size, weight, bias + panel * PANEL * 4, codes + row * groups * GROUP, groups * GROUP,
                scales + row * groups * 8, groups * 8, groups, out + row * out_stride + panel * PANEL * 4, out_stride,
                adds,
            )  # fmt: skip
            row += size
