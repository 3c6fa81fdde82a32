"""Kernels that take more than a multiprocessor has: prints what `kernels.compiling` says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator

import triton
import triton.language as tl

from kernels.compiling import Specialisation, compile_all


@triton.jit
def _matmul_kernel(a, b, out, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for i in range(count):
        total += tl.dot(tl.load(a + i * SIZE * SIZE + at), tl.load(b + i * SIZE * SIZE + at))
    tl.store(out + at, total)


@triton.jit
def _wrong_kernel(out):
    tl.store(out, no_such_name)  # noqa: F821


def serving() -> Iterator[Specialisation]:
    signature = {"a": "*fp16", "b": "*fp16", "out": "*fp32", "count": "i32"}
    yield Specialisation("registers", _matmul_kernel, signature, {"SIZE": 128}, num_warps=1, num_stages=1)
    yield Specialisation("shared", _matmul_kernel, signature, {"SIZE": 128}, num_warps=8, num_stages=5)
    yield Specialisation("error", _wrong_kernel, {"out": "*fp32"}, {})


if __name__ == "__main__":
    for row in compile_all(["tests.support.misfits"], [90]):
        print(json.dumps(row._asdict()))
