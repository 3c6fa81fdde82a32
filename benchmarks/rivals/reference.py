"""What the machine does just now: memory read and matmul rates, with so many threads. Run as a program: prints JSON.

A process of its own, so that its threads are gone while an engine runs. Each rate is the best of a second or so,
which is what an engine could reach, and how a slow phase of a shared machine is seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

_SECONDS = 0.7
_READ_BYTES = 512 << 20  # far more than any cache
_SIZE = 1024
_ROOT = Path(__file__).parents[2]


class Rates(NamedTuple):
    read_gb_s: float
    matmul_gflop_s: Mapping[str, float]  # by what the operands are; a multiplication and an addition are two


def measure_rates(threads: int) -> Rates:
    """In a process of its own. Raises CalledProcessError when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rivals.reference", str(threads)],
        capture_output=True, text=True, check=True, cwd=_ROOT, timeout=120,
        env={**os.environ, "OPENBLAS_NUM_THREADS": str(threads)},
    )  # fmt: skip
    return Rates(**json.loads(done.stdout))


def _read_rate() -> float:
    """GB/s of summing float32 values."""
    import torch

    values = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / _best_seconds(lambda: values.sum()) / 1e9


def _fp32_rate() -> float:
    import numpy as np

    values = np.ones((_SIZE, _SIZE), np.float32)
    return _gflop_s(lambda: values @ values)


def _bf16_rate() -> float:
    import torch

    values = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16)
    return _gflop_s(lambda: values @ values)


def _own_rate(bits: int) -> float:
    """Of Tandem's own kernels, activations rounded to 8 bits included."""
    from torch import randn

    from backend_lib.models.quantised import QuantisedLinear

    linear, values = QuantisedLinear(randn(_SIZE, _SIZE), None, bits), randn(_SIZE, _SIZE)
    return _gflop_s(lambda: linear(values))


def _gflop_s(multiply: Callable[[], object]) -> float:
    return 2 * _SIZE**3 / _best_seconds(multiply) / 1e9


# Whatever is added here is measured before and after each round, and has its bounds in the table of floors.
MATMUL_RATES: dict[str, Callable[[], float]] = {
    "fp32": _fp32_rate,
    "bf16": _bf16_rate,
    "int8": lambda: _own_rate(8),
    "int4": lambda: _own_rate(4),
}


def _best_seconds(run: Callable[[], object]) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while (started := time.perf_counter()) < end:
        run()
        best = min(best, time.perf_counter() - started)
    return best


def main(threads: int) -> None:
    import torch

    from backend_lib.models.linear import has_vector_kernels
    from backend_lib.models.threads import share_threads

    share_threads(threads, quantised=True)
    torch.set_num_threads(threads)  # which that has taken from torch
    kinds = MATMUL_RATES if has_vector_kernels() else {"fp32", "bf16"}
    rates = {kind: MATMUL_RATES[kind]() for kind in kinds}
    print(json.dumps({"read_gb_s": _read_rate(), "matmul_gflop_s": rates}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
