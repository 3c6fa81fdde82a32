"""Sums of products of 8-bit integers, in the instructions that this CPU has.

Codes of weights are unsigned, those of activations signed. A group has 32 products for each of 16 lanes, in 8 turns of
4 each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba
from llvmlite import ir

from kernels.cpu.ir import I8, I32, LANES, VI32, call, constant, shuffle

_HALF = LANES // 2
_I16 = ir.IntType(16)
_BYTES, _WORDS, _DWORDS = ir.VectorType(I8, 32), ir.VectorType(_I16, 16), ir.VectorType(I32, _HALF)
_NEEDED = ("avx2", "fma", "f16c")


class Products(NamedTuple):
    """A group's sums: `add(builder, sums, codes, activations)` takes int32 [16] of 4 bytes each."""

    start: Callable[[], Any]
    add: Callable[[ir.IRBuilder, Any, ir.Value, ir.Value], Any]
    finish: Callable[[ir.IRBuilder, Any], ir.Value]


def features() -> frozenset[str]:
    """What numba compiles for, in LLVM's names: what this CPU has, unless NUMBA_CPU_FEATURES says otherwise."""
    told = numba.config.CPU_FEATURES  # type: ignore[attr-defined]
    if told is not None:
        return frozenset(name[1:] for name in told.split(",") if name.startswith("+"))
    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


def is_supported() -> bool:
    return set(_NEEDED) <= features()


HAS_AVX512 = "avx512f" in features()
HAS_BF16 = {"avx512f", "avx512bw", "avx512bf16"} <= features()
HAS_VNNI = {"avx512f", "avx512vnni"} <= features()
MOST_ROWS = 8 if HAS_VNNI else 4


def products(bits: int) -> Products:
    """For unsigned codes of 4 or 8 bits."""
    if HAS_VNNI:
        return Products(lambda: constant(VI32, 0), _add_vnni, lambda b, sums: sums)
    if bits == 4:
        return Products(lambda: [constant(_WORDS, 0)] * 2, _add_words, _finish_words)
    return Products(lambda: ([constant(_WORDS, 0)] * 2,) * 2, _add_split, _finish_split)


def _add_vnni(b: ir.IRBuilder, sums: ir.Value, codes: ir.Value, activations: ir.Value) -> ir.Value:
    return call(b, "llvm.x86.avx512.vpdpbusd.512", VI32, sums, codes, activations)


def _add_words(b: ir.IRBuilder, sums: list, codes: ir.Value, activations: ir.Value) -> list:
    """8 turns of 2 * 15 * 127 at most stay within 16 bits."""
    return [
        b.add(total, call(b, "llvm.x86.avx2.pmadd.ub.sw", _WORDS, u, s))
        for total, u, s in zip(sums, _halves(b, codes), _halves(b, activations), strict=True)
    ]


def _finish_words(b: ir.IRBuilder, sums: list) -> ir.Value:
    ones = constant(_WORDS, 1)
    return _join(b, *(call(b, "llvm.x86.avx2.pmadd.wd", _DWORDS, total, ones) for total in sums))


def _add_split(b: ir.IRBuilder, sums: tuple[list, list], codes: ir.Value, activations: ir.Value) -> tuple[list, list]:
    """Two products of 255 * 127 do not fit into 16 bits: the halves of the codes are multiplied apart, 4 bits each."""
    low, high = sums
    four_bits = constant(VI32, 0x0F0F0F0F)
    upper = b.and_(b.lshr(codes, constant(VI32, 4)), four_bits)
    return _add_words(b, low, b.and_(codes, four_bits), activations), _add_words(b, high, upper, activations)


def _finish_split(b: ir.IRBuilder, sums: tuple[list, list]) -> ir.Value:
    low, high = (_finish_words(b, each) for each in sums)
    return b.add(low, b.shl(high, constant(VI32, 4)))


def _halves(b: ir.IRBuilder, x: ir.Value) -> list[ir.Value]:
    low, high = list(range(_HALF)), list(range(_HALF, LANES))
    return [b.bitcast(shuffle(b, x, x, lanes), _BYTES) for lanes in (low, high)]


def _join(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    return shuffle(b, low, high, list(range(LANES)))
