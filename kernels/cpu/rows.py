"""What stands between the products of a layer, row by row: norms, activations, and rounding to 8-bit codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from kernels.cpu.ir import (
    F32,
    I64,
    VF32,
    VI8,
    VI32,
    call,
    constant,
    exp,
    fma,
    load,
    loop,
    maximum,
    procedure,
    reduce_add,
    reduce_max,
    splat,
    store,
)  # fmt: skip
from kernels.cpu.matmul import GROUP

SILU, GELU_TANH = 0, 1
_ZERO = 1e-30  # a group with nothing larger is rounded to zero: the inverse of its scale would not be finite
_HALF_GROUP = GROUP // 2 * 4  # bytes
_GELU_INNER, _GELU_CUBE = 0.7978845608028654, 0.044715


def _round_group(b: ir.IRBuilder, parts: Sequence[ir.Value], codes: ir.Value, scale: ir.Value) -> None:
    """Store 32 float32 as int8 codes and, float32 [2], their scale and the sum of what the codes stand for."""
    largest = reduce_max(b, maximum(b, *(_absolute(b, part) for part in parts)))
    is_zero = b.fcmp_ordered("<", largest, F32(_ZERO))
    step = b.select(is_zero, F32(0.0), b.fmul(largest, F32(1 / 127)))
    inverse = splat(b, b.select(is_zero, F32(0.0), b.fdiv(F32(127.0), largest)))
    total = constant(VF32, 0.0)
    for place, part in enumerate(parts):
        rounded = call(b, "llvm.rint.v16f32", VF32, b.fmul(part, inverse))
        total = b.fadd(total, rounded)
        store(b, b.trunc(b.fptosi(rounded, VI32), VI8), codes, place * GROUP // 2)
    store(b, step, scale)
    store(b, b.fmul(step, reduce_add(b, total)), scale, 4)


def _absolute(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return call(b, "llvm.fabs.v16f32", VF32, x)


@procedure("iiii")
def quantise_row(b: ir.IRBuilder, x: ir.Value, groups: ir.Value, codes: ir.Value, scales: ir.Value) -> None:
    """float32 [32 groups] to int8 [32 groups] and float32 [groups, 2]."""

    def group(index: ir.Value) -> list:
        at = b.add(x, b.mul(index, I64(4 * GROUP)))
        parts = load(b, at, 0, VF32), load(b, at, _HALF_GROUP, VF32)
        _round_group(b, parts, *_targets(b, codes, scales, index))
        return []

    loop(b, groups, [], group)


def _targets(b: ir.IRBuilder, codes: ir.Value, scales: ir.Value, index: ir.Value) -> tuple[ir.Value, ir.Value]:
    return b.add(codes, b.mul(index, I64(GROUP))), b.add(scales, b.mul(index, I64(8)))


@procedure("iiifii")
def norm_row(
    b: ir.IRBuilder, x: ir.Value, weight: ir.Value, groups: ir.Value, eps: ir.Value, codes: ir.Value, scales: ir.Value
) -> None:
    """RMS norm of float32 [32 groups], rounded as `quantise_row` does."""
    inverse = _inverse_rms(b, x, groups, eps)

    def group(index: ir.Value) -> list:
        offset = b.mul(index, I64(4 * GROUP))
        parts = [_normed(b, x, weight, b.add(offset, I64(place)), inverse) for place in (0, _HALF_GROUP)]
        _round_group(b, parts, *_targets(b, codes, scales, index))
        return []

    loop(b, groups, [], group)


@procedure("iiifi")
def add_norm_row(
    b: ir.IRBuilder, x: ir.Value, weight: ir.Value, groups: ir.Value, eps: ir.Value, out: ir.Value
) -> None:
    """Add the RMS norm of `x` to `out`, float32 [32 groups] both."""
    inverse = _inverse_rms(b, x, groups, eps)

    def half_group(index: ir.Value) -> list:
        offset = b.mul(index, I64(_HALF_GROUP))
        to = b.add(out, offset)
        store(b, b.fadd(load(b, to, 0, VF32), _normed(b, x, weight, offset, inverse)), to)
        return []

    loop(b, b.mul(groups, I64(2)), [], half_group)


def _inverse_rms(b: ir.IRBuilder, x: ir.Value, groups: ir.Value, eps: ir.Value) -> ir.Value:
    def add_squares(index: ir.Value, total: ir.Value) -> list:
        value = load(b, b.add(x, b.mul(index, I64(_HALF_GROUP))), 0, VF32)
        return [fma(b, value, value, total)]

    halves = b.mul(groups, I64(2))
    (total,) = loop(b, halves, [constant(VF32, 0.0)], add_squares)
    count = b.sitofp(b.mul(groups, I64(GROUP)), F32)
    mean = b.fadd(b.fdiv(reduce_add(b, total), count), eps)
    return splat(b, b.fdiv(F32(1.0), call(b, "llvm.sqrt.f32", F32, mean)))


def _normed(b: ir.IRBuilder, x: ir.Value, weight: ir.Value, offset: ir.Value, inverse: ir.Value) -> ir.Value:
    value = b.fmul(load(b, b.add(x, offset), 0, VF32), inverse)
    return b.fmul(value, load(b, b.add(weight, offset), 0, VF32))


@procedure("iiiiii")
def activate_row(
    b: ir.IRBuilder, kind: ir.Value, gate: ir.Value, up: ir.Value, groups: ir.Value, codes: ir.Value, scales: ir.Value
) -> None:
    """activation(gate) * up of float32 [32 groups] each, rounded as `quantise_row` does."""
    with b.if_else(b.icmp_signed("==", kind, I64(SILU))) as (silu, gelu):
        with silu:
            _activate(b, _silu, gate, up, groups, codes, scales)
        with gelu:
            _activate(b, _gelu_tanh, gate, up, groups, codes, scales)


def _activate(
    b: ir.IRBuilder, activation: Callable[[ir.IRBuilder, ir.Value], ir.Value], gate: ir.Value, up: ir.Value,
    groups: ir.Value, codes: ir.Value, scales: ir.Value,
) -> None:  # fmt: skip
    def group(index: ir.Value) -> list:
        parts = []
        for place in (0, _HALF_GROUP):
            offset = b.add(b.mul(index, I64(4 * GROUP)), I64(place))
            value = activation(b, load(b, b.add(gate, offset), 0, VF32))
            parts.append(b.fmul(value, load(b, b.add(up, offset), 0, VF32)))
        _round_group(b, parts, *_targets(b, codes, scales, index))
        return []

    loop(b, groups, [], group)


def _silu(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    return _times_sigmoid(b, x, x)


def _gelu_tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """(1 + tanh y) / 2 is the logistic function of 2 y."""
    cube = fma(b, b.fmul(x, x), constant(VF32, _GELU_CUBE), constant(VF32, 1.0))
    return _times_sigmoid(b, x, b.fmul(b.fmul(x, cube), constant(VF32, 2 * _GELU_INNER)))


def _times_sigmoid(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    one = constant(VF32, 1.0)
    return b.fdiv(x, b.fadd(one, exp(b, b.fsub(constant(VF32, 0.0), y))))


@procedure("iif")
def soft_cap_row(b: ir.IRBuilder, x: ir.Value, halves: ir.Value, cap: ir.Value) -> None:
    """cap * tanh(x / cap) in place, of float32 [16 halves]."""

    def part(index: ir.Value) -> list:
        at = b.add(x, b.mul(index, I64(_HALF_GROUP)))
        store(b, soft_cap(b, load(b, at, 0, VF32), cap), at)
        return []

    loop(b, halves, [], part)


def soft_cap(b: ir.IRBuilder, x: ir.Value, cap: ir.Value) -> ir.Value:
    """tanh y = 1 - 2 / (1 + exp(2 y))"""
    doubled = b.fdiv(b.fmul(x, constant(VF32, 2.0)), splat(b, cap))
    one, two = constant(VF32, 1.0), constant(VF32, 2.0)
    tanh = b.fsub(one, b.fdiv(two, b.fadd(one, exp(b, doubled))))
    return b.fmul(tanh, splat(b, cap))
