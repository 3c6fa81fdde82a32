"""How much of the time the device has no work while the loop is loaded, and what a step costs the loop's thread."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.device.bench import Bench
from benchmarks.device.decode import summary
from benchmarks.device.report import Sheet
from benchmarks.device.requests import Placed, Requests, run_until_over

_SETTLING = 6  # steps of prompts, and until two decode steps follow each other


def run(sheet: Sheet, bench: Bench) -> None:
    sheet.attempt("loaded loop", _measure, bench, needs=20)


def _measure(bench: Bench) -> dict[str, Any]:
    engine, steps = bench.engine(), bench.scale.idle_steps
    requests = Requests(engine.arena)
    placed = _fill(requests, bench)

    def work() -> None:
        for _ in range(steps):
            engine.loop.run_once()

    for _ in range(_SETTLING):
        engine.loop.run_once()
    started, cpu = time.perf_counter(), time.thread_time()
    work()
    step_us, cpu_us = 1e6 * (time.perf_counter() - started) / steps, 1e6 * (time.thread_time() - cpu) / steps
    found = summary(bench.gpu.kernels(work))
    run_until_over(engine, requests, placed)
    busy_us = found["busy_us"] / steps
    return {
        "step_us": step_us, "busy_us a step": busy_us, "idle share": max(0.0, 1 - busy_us / step_us),
        "idle share, profiled": 1 - found["busy_us"] / max(found["span_us"], 1e-9), "loop CPU_us a step": cpu_us,
        "launches a step": found["launches"] / steps, "top": found["top"],
    }  # fmt: skip


def _fill(requests: Requests, bench: Bench) -> list[Placed]:
    scale = bench.scale
    max_tokens = 2 * scale.idle_steps + 2 * _SETTLING
    prompts = [[2 + (each + place) % 200 for place in range(scale.lengths[0])] for each in range(scale.idle_batch)]
    placed = [requests.place(prompt, max_tokens) for prompt in prompts]
    for each in placed:
        requests.post(each)
    return placed
