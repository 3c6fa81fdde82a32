"""Every kernel against its reference, in the types and at the sizes of serving, on inputs that are new each time.

Dense kernels and attention are in `kernel_checks`, what a draw is made of in `sampling_checks`.
"""

from __future__ import annotations

import random

import torch

from benchmarks.device.bench import Bench
from benchmarks.device.kernel_checks import DENSE
from benchmarks.device.report import Sheet
from benchmarks.device.sampling_checks import SAMPLING


def run(sheet: Sheet, bench: Bench) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    sheet.put("seed", seed)
    torch.manual_seed(seed)
    for name, check in SAMPLING.items():
        sheet.attempt(name, check, bench)
    for dtype in bench.scale.kernel_dtypes:
        for name, check in DENSE.items():
            sheet.attempt(f"{name}, {dtype}".replace("torch.", ""), check, bench, dtype)
