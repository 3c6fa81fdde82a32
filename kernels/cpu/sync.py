"""Atomic words and sleep, for threads that share the work of a step."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from kernels.cpu.compiled import jit
from kernels.cpu.ir import I64, call, procedure

_FUTEX = 202  # the system call's number on x86-64
_WAIT, _WAKE = 128, 129  # of this process's threads alone
_ALL = 0x7FFFFFFF

# The C library's function; it takes its arguments in registers, as if it were declared with all of them.
_syscall: Any = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))


@procedure("i", "i")
def read(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.load_atomic(b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@procedure("ii")
def write(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    b.store_atomic(value, b.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@procedure("ii", "i")
def add(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    """What was there before."""
    return b.atomic_rmw("add", b.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@procedure("iii", "i")
def replace(b: ir.IRBuilder, address: ir.Value, expected: ir.Value, value: ir.Value) -> ir.Value:
    """1 if `expected` was there, and is `value` now; else 0."""
    result = b.cmpxchg(b.inttoptr(address, I64.as_pointer()), expected, value, "seq_cst", "seq_cst")
    return b.zext(b.extract_value(result, 1), I64)


@procedure("")
def pause(b: ir.IRBuilder) -> None:
    call(b, "llvm.x86.sse2.pause", ir.VoidType())


@jit
def sleep_while(address, value, timeout):
    """Until `wake` of the address; not at all if its low half is not that of `value` any more. May end early.

    `timeout`: address of int64 [2], seconds and nanoseconds; 0 is none.
    """
    _syscall(_FUTEX, address, _WAIT, value & 0xFFFFFFFF, timeout, 0, 0)


@jit
def wake(address):
    _syscall(_FUTEX, address, _WAKE, _ALL, 0, 0, 0)
