"""What a busy neighbour costs: steps while other processes want the cores too.

Loops of `--rows` sequences decode with none, one and two processes beside them that do nothing but compute. Ideal is
the share of the cores that the kernel's scheduler leaves: with 2 cores and 2 threads, 2/3 beside one and 1/2 beside
two. fp16 is computed by torch's OpenMP threads, the default by our own; both get all cores here.

    python -m benchmarks.neighbour [--weights auto fp16] [--rows 1 8 32]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from backend_lib.config import Settings
from backend_lib.cores import usable_cores
from benchmarks.step import RealLoop

BUSY = [sys.executable, "-c", "while True: pass"]
STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", nargs="+", default=["auto", "fp16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args.model, args.weights[0], args.rows[0])
        return
    print("weights rows   ms a step beside 0, 1, 2 busy processes   times as long")
    for weights in args.weights:
        for rows in args.rows:
            command = [sys.executable, "-m", "benchmarks.neighbour", "--child", "--model", args.model]
            subprocess.run([*command, "--weights", weights, "--rows", str(rows)], check=True)


def measure(model: str, weights: str, rows: int) -> None:
    """In a process of its own: threads are shared out once."""
    settings = Settings(model=model, weights=weights, max_running=rows, threads=usable_cores())
    times = []
    for count in range(3):
        loop = RealLoop(settings, rows)
        loop.warm_up(STEPS)
        with busy(count):
            times.append(loop.milliseconds(STEPS))
    ratios = " ".join(f"{each / times[0]:5.2f}" for each in times[1:])
    print(f"{weights:7s} {rows:4d}   {times[0]:10.2f} {times[1]:10.2f} {times[2]:10.2f}     {ratios}", flush=True)


@contextmanager
def busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen(BUSY) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
