"""Compile Triton kernels for GPUs that are not here, and say what they take: registers, spills, shared memory.

    python -m kernels.compiling [--sm 80 90 100] [--dtype bf16] [--only NAME ...] [--jobs N]

prints a line of JSON for each specialisation that a kernel module names in its `serving()`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import kernels

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes that one block may have
DTYPES = ("bf16", "fp16", "fp32")
# How often these stand in the PTX says whether tensor cores are used, loads are wide and asynchronous, and products are
# rounded before they are added.
INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05": r"tcgen05\.mma",
    "mma": r"\bmma\.sync",
    "fma": r"\bfma\.rn\.f32",
    "cp.async": r"cp\.async\.c[ag]",
    "cp.async 16": r"cp\.async\.c[ag]\S* .*, 0x10,",
    "ld": r"ld\.global",
    "ld 16": r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64",
}


class Specialisation(NamedTuple):
    """One way in which the engine launches a kernel.

    Attributes:
        name: in words, unique in its module.
        signature: types of the arguments that are no constants, as Triton writes them: "*bf16", "i32", "fp32".
        unaligned: pointers and strides that need not be multiples of 16; all others are taken to be. Strides are the
            integers whose names contain "stride".
        architectures: on which it is launched so.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    unaligned: tuple[str, ...] = ()
    architectures: tuple[int, ...] = ARCHITECTURES

    @property
    def dtype(self) -> str:
        """What the kernel computes on: 16 bits if any of its pointers has them."""
        return next((each for each in DTYPES if f"*{each}" in self.signature.values()), "fp32")


class Compiled(NamedTuple):
    """What a specialisation takes of a multiprocessor.

    Attributes:
        registers: of a thread.
        spill_bytes: that a thread writes and reads outside its registers.
        shared_bytes: of a block.
        ptx: its instructions.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str

    def count(self, instruction: str) -> int:
        return len(re.findall(INSTRUCTIONS[instruction], self.ptx))


def compile_for(spec: Specialisation, sm: int) -> Compiled:
    """Compile for an architecture (80, 90, 100); needs no GPU. Not in a process that runs Triton's interpreter."""
    source = ASTSource(spec.kernel, _signature(spec), dict(spec.constexprs), _aligned(spec))
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    binary = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    registers, spill_bytes = _resources(binary.asm["ptx"], sm)
    return Compiled(registers, spill_bytes, binary.metadata.shared, binary.asm["ptx"])


def _signature(spec: Specialisation) -> dict[str, str]:
    given = {**spec.signature, **dict.fromkeys(spec.constexprs, "constexpr")}
    wrong = set(given) ^ set(spec.kernel.arg_names)
    assert not wrong, f"{spec.name}: {wrong} are given or wanted only"
    return {name: given[name] for name in spec.kernel.arg_names}


def _aligned(spec: Specialisation) -> dict[tuple[int], list]:
    """What a launch tells the compiler of arguments that are multiples of 16."""
    attributes = {}
    for parameter in spec.kernel.params:
        kind = spec.signature.get(parameter.name, "")
        divisible = kind.startswith("*") or (kind.startswith("i") and "stride" in parameter.name)
        asked = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if divisible and asked and parameter.name not in spec.unaligned:
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return attributes


def _resources(ptx: str, sm: int) -> tuple[int, int]:
    """Registers and bytes of spills, as the assembler tells."""
    target = re.search(r"\.target (\w+)", ptx)
    assert target
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(sm).path, "-v", f"--gpu-name={target[1]}", file.name, "-o", os.devnull]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.findall(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill", said)
    return max(map(int, registers)), sum(map(int, spills))


class Row(NamedTuple):
    """A line of the table. `error` is set instead of the figures if it did not compile."""

    module: str
    name: str
    dtype: str
    sm: int
    num_warps: int
    num_stages: int
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    instructions: Mapping[str, int] = {}
    error: str | None = None


def modules() -> list[str]:
    """The kernel modules, which are those with a `serving`."""
    folder = Path(kernels.__file__).parent
    names = [each.name for each in pkgutil.iter_modules([str(folder)]) if not each.ispkg]
    return [f"kernels.{name}" for name in names if "\ndef serving(" in (folder / f"{name}.py").read_text()]


@cache
def specialisations(module: str) -> list[Specialisation]:
    found = list(importlib.import_module(module).serving())
    names = [each.name for each in found]
    assert len(set(names)) == len(names), f"{module}: two specialisations have one name"
    return found


def compile_all(
    names: Iterable[str], architectures: Iterable[int] = ARCHITECTURES, dtype: str | None = None, jobs: int = 2
) -> Iterator[Row]:
    """Rows of modules, in order. With a dtype, what computes on that, and kernels that know none but float32."""
    work = [
        (module, number, sm)
        for module in names
        for number in _selected(specialisations(module), dtype)
        for sm in architectures
        if sm in specialisations(module)[number].architectures
    ]
    # Not by fork: this process may have threads by now.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_row, *zip(*work, strict=True))


def _selected(specs: Sequence[Specialisation], dtype: str | None) -> list[int]:
    with_dtypes = {each.kernel.__name__ for each in specs if each.dtype != "fp32"}
    return [
        number
        for number, each in enumerate(specs)
        if dtype in (None, each.dtype) or each.kernel.__name__ not in with_dtypes
    ]


def _row(module: str, number: int, sm: int) -> Row:
    spec = specialisations(module)[number]
    row = Row(module, spec.name, spec.dtype, sm, spec.num_warps, spec.num_stages)
    try:
        compiled = compile_for(spec, sm)
    except Exception as error:  # whatever a compiler raises, the other rows are wanted too
        return row._replace(error=f"{type(error).__name__}: {error}"[-2000:])
    counts = {name: count for name in INSTRUCTIONS if (count := compiled.count(name))}
    figures = compiled.registers, compiled.spill_bytes, compiled.shared_bytes
    return row._replace(registers=figures[0], spill_bytes=figures[1], shared_bytes=figures[2], instructions=counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="kernel modules, such as norm")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 8))
    arguments = parser.parse_args()
    names = [f"kernels.{name}" for name in arguments.only] if arguments.only else modules()
    for row in compile_all(names, arguments.sm, arguments.dtype, arguments.jobs):
        print(json.dumps(row._asdict()), flush=True)


if __name__ == "__main__":
    main()
