"""The stages in order, and the process that runs them.

    python -m benchmarks.device.stages FILE.json DEADLINE DRY STAGE...

A GPU's context that one kernel has broken is broken for all that follows in the process. So this process ends there,
and `benchmarks.device_check` starts another one, which goes on after the item that did it.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import shutil
import sys
import time
from pathlib import Path

from benchmarks.device.report import Broken, Report, Sheet

# name → module; seconds after which a stage is taken to hang, beside the deadline of all.
STAGES = {
    "environment": ("environment", 60), "kernels": ("kernels", 150), "tokens": ("tokens", 120),
    "speed": ("decode", 200), "transformers": ("peer", 100), "serving": ("serving", 150), "idle": ("idle", 60),
    "tuning": ("tune", 200), "group": ("group", 60),
}  # fmt: skip
BROKEN = 75  # exit status
GRACE = 25  # seconds that a stage may run on past the deadline of all


def main() -> None:
    path, deadline, dry, *names = sys.argv[1:]
    is_dry = dry == "dry"
    if is_dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    from benchmarks.device import gpu, scale
    from benchmarks.device.bench import Bench

    report = Report(Path(path))
    device = gpu.find(is_dry=is_dry)
    bench = Bench(scale.DRY if is_dry else scale.REAL, device, report)
    try:
        for name in names:
            _run(name, bench, float(deadline))
    except Broken:
        os._exit(BROKEN)
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)


def _run(name: str, bench: object, deadline: float) -> None:
    module, limit = STAGES[name]
    report: Report = bench.report  # type: ignore[attr-defined]
    sheet = Sheet(report, name, deadline, bench.gpu.is_alive)  # type: ignore[attr-defined]
    started = time.monotonic()
    faulthandler.dump_traceback_later(min(limit, max(sheet.seconds_left, 0) + GRACE), exit=True)
    print(f"{name} … ", file=sys.stderr, end="", flush=True)
    try:
        importlib.import_module(f"benchmarks.device.{module}").run(sheet, bench)
        sheet.record["state"] = "done" if sheet.seconds_left > 0 else "cut short: the time is over"
    except Broken:
        sheet.record["state"] = "the GPU's context was lost"
        raise
    except Exception as error:  # an item's are its own; this is the stage's
        import traceback

        sheet.record["state"] = f"failed: {type(error).__name__}: {error}"[:500]
        sheet.put("stage", {"error": traceback.format_exc()[-4000:]})
        if not bench.gpu.is_alive():  # type: ignore[attr-defined]
            raise Broken from None
    finally:
        faulthandler.cancel_dump_traceback_later()
        sheet.record["seconds"] += time.monotonic() - started
        report.save()
        print(f"{sheet.record['state']}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
