"""Small words for writing LLVM vector code: what numba's own loops cannot be relied upon to become.

Kernels hand addresses around as int64. Vectors have 16 lanes whatever the machine's registers hold; LLVM splits them.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 16
I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
F16, F32 = ir.HalfType(), ir.FloatType()
VI8, VI32 = ir.VectorType(I8, LANES), ir.VectorType(I32, LANES)
VF16, VF32 = ir.VectorType(F16, LANES), ir.VectorType(F32, LANES)


class _BFloat(ir.Type):
    """LLVM's bfloat, for which llvmlite has no class."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)  # two to each of 16 lanes

_HALVINGS = (8, 4, 2, 1)

_LOG2_E = 1.4426950408889634
# exp(r) on |r| <= ln(2) / 2, highest power first; ln(2) in two parts, so that x - n ln(2) loses nothing.
_EXP_TERMS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4


def constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def load(b: ir.IRBuilder, address: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    at = b.inttoptr(b.add(address, I64(offset)), kind.as_pointer())
    return b.load(at, align=1)


def store(b: ir.IRBuilder, value: ir.Value, address: ir.Value, offset: int = 0) -> None:
    at = b.inttoptr(b.add(address, I64(offset)), value.type.as_pointer())
    b.store(value, at, align=1)


def splat(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """All lanes are `value`."""
    kind = ir.VectorType(value.type, LANES)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
    return lane_splat(b, first, 0)


def lane_splat(b: ir.IRBuilder, vector: ir.Value, lane: int) -> ir.Value:
    return shuffle(b, vector, vector, [lane] * LANES)


def shuffle(b: ir.IRBuilder, left: ir.Value, right: ir.Value, lanes: list[int]) -> ir.Value:
    return b.shuffle_vector(left, right, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    """One of LLVM's own functions, such as `llvm.fma.v16f32`."""
    function = b.module.globals.get(name)
    if function is None:
        function = ir.Function(b.module, ir.FunctionType(result, [arg.type for arg in args]), name)
    return b.call(function, args)


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return call(b, "llvm.fma.v16f32", VF32, x, y, z)


def bf16_pairs(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Two vectors of float32, one after the other, rounded to bfloat16: int32 [16], each the bits of two neighbours."""
    rounded = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", BF16_PAIRS, high, low)
    return b.bitcast(rounded, VI32)


def add_products_of_pairs(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """z + x y, lane by lane, where a lane of x and y is two bfloat16 and a product the sum of two."""
    pairs = [b.bitcast(each, BF16_PAIRS) for each in (x, y)]
    return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", VF32, z, *pairs)


def maximum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The instruction's own: `y` where either is not a number."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def minimum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def reduce_max(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    for step in _HALVINGS:
        x = maximum(b, x, shuffle(b, x, x, [lane ^ step for lane in range(LANES)]))
    return b.extract_element(x, I32(0))


def reduce_add(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Float32 lanes summed in halves: 8 + 8, 4 + 4, and so on."""
    for step in _HALVINGS:
        x = b.fadd(x, shuffle(b, x, x, [lane ^ step for lane in range(LANES)]))
    return b.extract_element(x, I32(0))


def exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x of float32 lanes within 2 units in the last place; arguments are kept in [-87, 88]."""
    x = maximum(b, x, constant(VF32, -87.0))
    x = minimum(b, x, constant(VF32, 88.0))
    n = call(b, "llvm.rint.v16f32", VF32, b.fmul(x, constant(VF32, _LOG2_E)))
    rest = fma(b, n, constant(VF32, -_LN2_HIGH), x)
    rest = fma(b, n, constant(VF32, -_LN2_LOW), rest)
    power = constant(VF32, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        power = fma(b, power, rest, constant(VF32, term))
    scale = b.shl(b.add(b.fptosi(n, VI32), constant(VI32, 127)), constant(VI32, 23))
    return b.fmul(power, b.bitcast(scale, VF32))


def loop(b: ir.IRBuilder, count: ir.Value, carried: list[ir.Value], body: Callable[..., list[ir.Value]]) -> list:
    """`for i in range(count)`, count at least 1: `body(i, *carried)` gives what the next round carries."""
    before = b.block
    block, after = b.append_basic_block("loop"), b.append_basic_block("after")
    b.branch(block)
    b.position_at_end(block)
    index = b.phi(I64)
    index.add_incoming(I64(0), before)
    phis = [b.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)
    new = body(index, *phis)
    following = b.add(index, I64(1))
    index.add_incoming(following, b.block)
    for phi, value in zip(phis, new, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), block, after)
    b.position_at_end(after)
    return new


def procedure(signature: str, returns: str = "") -> Callable[[Callable[..., ir.Value | None]], Any]:
    """What `emit(builder, *values)` writes, as a function for compiled code.

    `signature`: a letter an argument, `i` for int64 and `f` for float32; `returns`: one such, or nothing.
    """
    kinds = {"i": types.int64, "f": types.float32, "": types.void}
    typed_as = kinds[returns](*(kinds[letter] for letter in signature))

    def wrap(emit: Callable[..., ir.Value | None]) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if value is None else value

        def typed(context: Any, *args: Any) -> Any:
            return typed_as, generate

        # numba asks for the names of the arguments.
        names = ["context", *(f"a{place}" for place in range(len(signature)))]
        typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in names])  # type: ignore[attr-defined]
        return intrinsic(typed)

    return wrap


@procedure("i", "f")
def load_float(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load(b, address, 0, F32)


@procedure("if")
def store_float(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    store(b, value, address)


@procedure("i", "f")
def load_half(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.fpext(load(b, address, 0, F16), F32)


@procedure("if")
def store_half(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    store(b, b.fptrunc(value, F16), address)


@procedure("i", "i")
def load_byte(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.zext(load(b, address, 0, I8), I64)


@procedure("ii")
def store_byte(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    store(b, b.trunc(value, I8), address)


@procedure("i", "i")
def load_int32(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.sext(load(b, address, 0, I32), I64)


@procedure("ii")
def store_int32(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    store(b, b.trunc(value, I32), address)


@procedure("i", "i")
def load_int64(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load(b, address, 0, I64)


@procedure("i")
def prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    """A line of memory that will be read soon."""
    prefetch_line(b, address)


def prefetch_line(b: ir.IRBuilder, address: ir.Value) -> None:
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    function = b.module.globals.get("llvm.prefetch.p0") or ir.Function(b.module, kind, "llvm.prefetch.p0")
    b.call(function, [b.inttoptr(address, I8.as_pointer()), I32(0), I32(3), I32(1)])


@procedure("i", "f")
def float_of_bits(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The float32 whose bits are the low half of `value`."""
    return b.bitcast(b.trunc(value, I32), F32)


@intrinsic
def _int64_pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], I64.as_pointer())

    return types.CPointer(types.int64)(types.int64), generate


@numba.njit
def int64_array(address, rows, columns):
    """The int64 [rows, columns] at an address."""
    return numba.carray(_int64_pointer(address), (rows, columns))  # type: ignore[call-arg]
