"""One layer's product in each format, by one thread, with weights in no cache: how many times as fast as fp32.

    python benchmarks/products.py [--seconds 4] [--rows 1 8 32 256]

Once with all the instructions that this CPU has, and once with none beyond AVX2 (told to numba, torch, oneDNN, MKL and
fbgemm by their environment variables). All formats take turns call by call, and so do the two sets of instructions
shape by shape; the figure is the median. Each call takes the next of so many copies that they fill 64 MB. Rounding of
the activations counts. The program's own formats are run as a decoder's program runs them, the others as torch does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest import mock

if __name__ == "__main__" and not __package__:  # run as a file, which puts only its own folder on the path
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import torch.multiprocessing

from backend_lib.models.linear import DenseLinear, Fp16Linear
from backend_lib.models.quantised import QuantisedLinear
from backend_lib.models.threads import share_threads, team
from benchmarks.formats.comparators import FbgemmInt8Linear
from benchmarks.formats.report import markdown_table, text_table
from kernels.cpu import operations, program

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)]  # SmolLM2-135M's: inputs, outputs
COLD_BYTES = 64 << 20
_HASWELL = "avx avx2 bmi bmi2 cmov cx16 cx8 f16c fma fsgsbase fxsr invpcid lzcnt mmx movbe pclmul popcnt rdrnd sahf"
_SSE = "sse sse2 sse3 sse4.1 sse4.2 ssse3 xsave xsaveopt"
INSTRUCTIONS: dict[str, dict[str, str]] = {
    "all": {},
    "AVX2": {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in f"{_HASWELL} {_SSE}".split()),
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    },
}
BASE = "fp32"


class Cell(NamedTuple):
    """Medians in microseconds, by format."""

    instructions: str
    shape: tuple[int, int]
    rows: int
    times: dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 256])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each shape and number of rows")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    cells = list(_measure(args.rows, args.seconds))
    for instructions in INSTRUCTIONS:
        table = _table([cell for cell in cells if cell.instructions == instructions])
        print(f"\ninstructions: {instructions}\n")
        print(markdown_table(table) if args.markdown else text_table(table))
    if args.json:
        args.json.write_text(json.dumps([cell._asdict() for cell in cells], indent=2) + "\n")
    return 0


def _measure(rows: Sequence[int], seconds: float) -> Iterator[Cell]:
    pipes = {name: _start(variables) for name, variables in INSTRUCTIONS.items()}
    for shape in SHAPES:
        for name, pipe in pipes.items():
            pipe.send((shape, rows, seconds))
            for number, times in pipe.recv().items():
                yield Cell(name, shape, number, times)
            print(f"{shape} with {name} done", file=sys.stderr)
    for pipe in pipes.values():
        pipe.send(None)


def _start(variables: Mapping[str, str]) -> Connection:
    """A process that has them set before it loads a library that reads them."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with mock.patch.dict(os.environ, variables):
        context.Process(target=_serve, args=(theirs,), daemon=True).start()
    theirs.close()
    return ours


def _serve(pipe: Connection) -> None:
    share_threads(1, quantised=True)
    while (order := pipe.recv()) is not None:
        shape, rows, seconds = order
        layers = _layers(*shape)
        pipe.send({number: _times(_calls(layers, number), seconds) for number in rows})


def _layers(inputs: int, outputs: int) -> dict[str, list]:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) / inputs**0.5
    makers: dict[str, tuple[Callable, float]] = {
        BASE: (lambda: DenseLinear(weight.clone(), None), 4),
        "fp16": (lambda: Fp16Linear(weight.clone(), None), 2),
        "fbgemm int8": (lambda: FbgemmInt8Linear(weight, None), 1),
        "int8": (lambda: QuantisedLinear(weight, None, 8), 34 / 32),
        "int4": (lambda: QuantisedLinear(weight, None, 4), 20 / 32),
    }
    return {name: _copies(make, size * inputs * outputs) for name, (make, size) in makers.items()}


def _copies(make: Callable, size: float) -> list:
    return [make() for _ in range(int(-(-COLD_BYTES // size)))]


def _calls(layers: Mapping[str, list], rows: int) -> dict[str, list[Callable[[], object]]]:
    calls: dict[str, list[Callable[[], object]]] = {}
    for name, copies in layers.items():
        x = torch.randn(rows, 1, generator=torch.Generator().manual_seed(1)).expand(rows, _inputs(layers)).contiguous()
        x *= torch.rand(x.shape, generator=torch.Generator().manual_seed(2))
        ours = isinstance(copies[0], QuantisedLinear)
        calls[name] = [_program_call(each, x) if ours else _torch_call(each, x) for each in copies]
    return calls


def _inputs(layers: Mapping[str, list]) -> int:
    return layers[BASE][0].weight.shape[1]


def _torch_call(layer: Callable, x: torch.Tensor) -> Callable[[], object]:
    return lambda: layer(x)


def _program_call(layer: QuantisedLinear, x: torch.Tensor) -> Callable[[], object]:
    codes = np.empty((len(x), layer.inputs), np.int8)
    scales = np.empty((len(x), layer.groups, 2), np.float32)
    out = np.empty((len(x), layer.outputs), np.float32)
    rounded = operations.quantise(x.numpy(), layer.groups, codes, scales)
    table = operations.table([rounded, operations.linear(layer, codes, scales, out)])
    step = np.zeros(program.STEP_WORDS, np.int64)
    step[program.TOKENS] = len(x)
    kept = codes, scales, out, x  # what the table has the addresses of
    return lambda: (team().run(table, step), kept)


def _times(calls: Mapping[str, list[Callable[[], object]]], seconds: float) -> dict[str, float]:
    """Medians in microseconds; the first round warms up."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    turn, end = 0, time.perf_counter() + seconds
    while turn < 6 or time.perf_counter() < end:
        for name, each in calls.items():
            call = each[turn % len(each)]
            started = time.perf_counter()
            with torch.inference_mode():
                call()
            spent[name].append((time.perf_counter() - started) * 1e6)
        turn += 1
    return {name: median(times[1:]) for name, times in spent.items()}


def _table(cells: Sequence[Cell]) -> list[list[str]]:
    names = list(cells[0].times)
    head = ["inputs, outputs", "rows", f"{BASE}, µs", *(f"{name}, times" for name in names if name != BASE)]
    return [head, *(_row(cell, names) for cell in cells)]


def _row(cell: Cell, names: Sequence[str]) -> list[str]:
    base = cell.times[BASE]
    ratios = [f"{base / cell.times[name]:.2f}" for name in names if name != BASE]
    return [f"{cell.shape[0]}, {cell.shape[1]}", str(cell.rows), f"{base:.0f}", *ratios]


if __name__ == "__main__":
    sys.exit(main())
