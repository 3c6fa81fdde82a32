"""From the fused projection to what attention reads: norms of heads, rotation, and keys and values into the pool."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir

from kernels.cpu.attention import PAIRS
from kernels.cpu.compiled import jit
from kernels.cpu.ir import I64, LANES, VF16, VF32, bf16_pairs, load, load_float, loop, procedure, store, store_float


@jit
def fill_rotation(position, frequencies, half, magnitude, out):
    """Cosines and then sines of a position, float32 [2, half]."""
    for i in range(half):
        angle = np.float32(position) * load_float(frequencies + 4 * i)
        store_float(out + 4 * i, np.float32(math.cos(angle)) * magnitude)
        store_float(out + 4 * (half + i), np.float32(math.sin(angle)) * magnitude)


@jit
def rotate(head, rotation, half):
    """The first 2 half floats of a head, in place: its halves are the two coordinates."""
    for i in range(half):
        cosine, sine = load_float(rotation + 4 * i), load_float(rotation + 4 * (half + i))
        x, y = load_float(head + 4 * i), load_float(head + 4 * (half + i))
        store_float(head + 4 * i, x * cosine - y * sine)
        store_float(head + 4 * (half + i), y * cosine + x * sine)


@jit
def norm_head(head, weight, size, eps):
    total = np.float32(0.0)
    for i in range(size):
        value = load_float(head + 4 * i)
        total += value * value
    inverse = np.float32(1.0) / np.float32(math.sqrt(total / np.float32(size) + eps))
    for i in range(size):
        store_float(head + 4 * i, load_float(head + 4 * i) * inverse * load_float(weight + 4 * i))


@jit
def scale_head(head, size, factor):
    for i in range(size):
        store_float(head + 4 * i, load_float(head + 4 * i) * factor)


@procedure("iiii")
def store_heads(b: ir.IRBuilder, size: ir.Value, x: ir.Value, floats: ir.Value, out: ir.Value) -> None:
    """float32 [floats] into a pool of `size` bytes a value."""
    with b.if_else(b.icmp_signed("==", size, I64(2))) as (two, four):
        with two:
            _store_pairs(b, x, floats, out) if PAIRS else _store_as(b, x, floats, out, VF16)
        with four:
            _store_as(b, x, floats, out, VF32)


def _store_as(b: ir.IRBuilder, x: ir.Value, floats: ir.Value, out: ir.Value, kind: ir.VectorType) -> None:
    size = LANES * (2 if kind is VF16 else 4)

    def part(index: ir.Value) -> list:
        value = load(b, b.add(x, b.mul(index, I64(4 * LANES))), 0, VF32)
        store(b, b.fptrunc(value, VF16) if kind is VF16 else value, b.add(out, b.mul(index, I64(size))))
        return []

    loop(b, b.udiv(floats, I64(LANES)), [], part)


def _store_pairs(b: ir.IRBuilder, x: ir.Value, floats: ir.Value, out: ir.Value) -> None:
    def part(index: ir.Value) -> list:
        at = b.add(x, b.mul(index, I64(8 * LANES)))
        pairs = bf16_pairs(b, load(b, at, 0, VF32), load(b, at, 4 * LANES, VF32))
        store(b, pairs, b.add(out, b.mul(index, I64(4 * LANES))))
        return []

    loop(b, b.udiv(floats, I64(2 * LANES)), [], part)
