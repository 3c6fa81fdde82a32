"""The machine: what it is, and what its memory and its matrix products allow at most."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

from benchmarks.device.bench import Bench
from benchmarks.device.report import Sheet


def run(sheet: Sheet, bench: Bench) -> None:
    sheet.attempt("machine", _machine, bench)
    for name, measure in RATES.items():
        sheet.attempt(name, measure, bench)


def _machine(bench: Bench) -> dict[str, Any]:
    packages = {name: version(name) for name in ("torch", "triton", "transformers", "numpy")}
    return bench.gpu.description() | {"python": platform.python_version()} | packages


def _copy(bench: Bench) -> dict[str, float]:
    """Read and written bytes."""
    source = torch.randn(bench.scale.copied // 2, device=bench.gpu.device, dtype=bench.scale.dtype)
    target = torch.empty_like(source)
    seconds = bench.gpu.seconds(lambda: target.copy_(source))
    return {"per_second": 2 * source.nbytes / seconds, "GB/s": 2 * source.nbytes / seconds / 1e9}


def _products(bench: Bench) -> dict[str, float]:
    side = bench.scale.square
    a, b = (torch.randn(side, side, device=bench.gpu.device, dtype=bench.scale.dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = bench.gpu.seconds(lambda: torch.mm(a, b, out=out))
    return {"per_second": 2 * side**3 / seconds, "TFLOP/s": 2 * side**3 / seconds / 1e12}


RATES: dict[str, Callable[[Bench], dict[str, float]]] = {"copy": _copy, "products": _products}
