"""Checks and times everything on a GPU, in one command of under eight minutes, in the order of what matters most.

    python -m benchmarks.device_check [--out FILE.json] [--budget SECONDS] [--stages NAME ...]

The file is whole after every item, and the table at the end is a line for each. What fails is in the file with its
traceback, and the rest goes on; what the time does not suffice for is skipped and said to be. With `--again` items that
a file has already are left out.

Without a GPU `--dry-run` runs the same code in Triton's interpreter, tiny, so that times mean nothing; and `--count`
prints launches and bytes of a decode step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.device.report import BEGUN, Report, is_trouble, table
from benchmarks.device.stages import BROKEN, GRACE, STAGES

MAX_DEATHS = 4  # of a stage's processes, then the next stage's turn comes


def main() -> None:
    arguments = _arguments()
    if arguments.count:
        from benchmarks.device import count

        count.main()
        return
    path = arguments.out.resolve()
    if not arguments.again:
        path.unlink(missing_ok=True)
    report = _run_all(path, time.monotonic() + arguments.budget, arguments.stages, is_dry=arguments.dry_run)
    if arguments.dry_run:
        print("Without a GPU, in Triton's interpreter: times and rates mean nothing.")
    print(table(report))
    trouble = [
        f"{name}: {item}"
        for name, stage in report.stages.items()
        for item, value in stage["items"].items()
        if is_trouble(value)
    ]
    print("\n".join(["", f"{len(trouble)} failed or wrong", *trouble]))
    sys.exit(bool(trouble))


def _run_all(path: Path, deadline: float, stages: list[str], *, is_dry: bool) -> Report:
    left, deaths = list(stages), dict.fromkeys(stages, 0)
    while left and time.monotonic() < deadline:
        status = _run(path, deadline, left, is_dry=is_dry)
        report = Report(path)
        if status == 0:
            break
        left = [name for name in left if report.stages.get(name, {}).get("state", BEGUN) != "done"]
        words = "the GPU's context was lost" if status == BROKEN else f"its process ended with {status}"
        buried = report.bury(words)
        if not left:
            break
        deaths[left[0]] += 1
        if deaths[left[0]] == MAX_DEATHS or not (buried or status == BROKEN):
            report.stage(left.pop(0))["state"] = f"given up: {words}"
            report.save()
    report = Report(path)
    for name in stages:
        stage = report.stage(name)
        if stage["state"] == BEGUN:
            stage["state"] = "cut off: the time is over" if stage["items"] else "skipped: no time was left"
    report.save()
    return report


def _run(path: Path, deadline: float, stages: list[str], *, is_dry: bool) -> int:
    command = [sys.executable, "-m", "benchmarks.device.stages", str(path), str(deadline), "dry" if is_dry else "gpu"]
    try:
        limit = max(deadline - time.monotonic(), 0) + 2 * GRACE
        return subprocess.run([*command, *stages], timeout=limit, check=False).returncode
    except subprocess.TimeoutExpired:
        return -9


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("device_check.json"))
    parser.add_argument("--budget", type=float, default=460.0, help="seconds")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--count", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
