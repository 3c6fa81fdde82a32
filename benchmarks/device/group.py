"""A group of one rank over NCCL, as tensor parallelism would use it: its collectives inside a captured graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.device.bench import Bench
from benchmarks.device.report import Sheet


def run(sheet: Sheet, bench: Bench) -> None:
    try:
        sheet.attempt("init", _init, bench, needs=15)
        for name, collective in (("all_reduce", dist.all_reduce), ("broadcast", lambda each: dist.broadcast(each, 0))):
            sheet.attempt(name, _collective, bench, collective, needs=10)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _init(bench: Bench) -> dict[str, Any]:
    dist.init_process_group(bench.gpu.backend, rank=0, world_size=1, store=dist.HashStore())
    values = torch.ones(16, device=bench.gpu.device)
    dist.all_reduce(values)
    return {"ok": bool((values == 1).all()), "backend": bench.gpu.backend}


def _collective(bench: Bench, collective: Any) -> dict[str, Any]:
    """After each replay the values are those before it, plus one from the kernel captured beside the collective."""
    values = torch.zeros(bench.scale.max_running, bench.scale.large["hidden_size"], device=bench.gpu.device)

    def work() -> None:
        values.add_(1)
        collective(values)

    replay = bench.gpu.capture(work)
    before = float(values[0, 0])
    seconds = bench.gpu.seconds(replay)
    values.fill_(before)
    replay()
    bench.gpu.synchronise()
    return {"ok": bool((values == before + 1).all()), "us": seconds * 1e6}
