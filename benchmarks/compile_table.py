"""What the Triton kernels take of a GPU's multiprocessor, as the compiler and the assembler tell. Needs no GPU.

python benchmarks/compile_table.py [--only NAME ...] [--dtype bf16] [--sm 80 90 100]
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import groupby
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file, which puts only its own folder on the path
    sys.path.insert(0, str(Path(__file__).parents[1]))

import triton

from benchmarks.formats.report import markdown_table
from kernels.compiling import ARCHITECTURES, DTYPES, SHARED_LIMIT, Row, compile_all, modules


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="kernel modules, such as norm")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--sm", type=int, nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    arguments = parser.parse_args()
    names = [f"kernels.{name}" for name in arguments.only] if arguments.only else modules()
    rows = list(compile_all(names, arguments.sm, arguments.dtype, os.cpu_count() or 1))
    print(f"Triton {triton.__version__}. Registers of a thread, bytes spilled by a thread, KiB of shared memory.\n")
    print(table(rows))


def table(rows: list[Row]) -> str:
    """A line for each specialisation, the architectures side by side."""
    architectures = list(dict.fromkeys(row.sm for row in rows))
    head = ["kernel", "specialisation", "warps", "stages", *(f"sm_{sm}" for sm in architectures), "products"]
    groups = groupby(rows, lambda row: (row.module, row.name))
    return markdown_table([head, *(_line(list(group)) for _, group in groups)])


def _line(group: list[Row]) -> list[str]:
    first = group[0]
    used = ", ".join(dict.fromkeys(kind for row in group for kind in _PRODUCTS if kind in row.instructions))
    name = first.module.removeprefix("kernels.")
    return [name, first.name, str(first.num_warps), str(first.num_stages), *map(_figures, group), used]


_PRODUCTS = ("mma", "wgmma", "tcgen05")


def _figures(row: Row) -> str:
    if row.error:
        return row.error.splitlines()[-1]
    over = " (too much)" if row.shared_bytes > SHARED_LIMIT[row.sm] else ""
    return f"{row.registers}, {row.spill_bytes}, {row.shared_bytes / 1024:.1f}{over}"


if __name__ == "__main__":
    main()
