"""Decoding and prompts of the large model, as shares of what the machine allows, and a step's kernels."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from benchmarks.device.bench import Bench
from benchmarks.device.gpu import Kernel, busy_us
from benchmarks.device.report import Sheet

TOP = 12
# Sampling parameters of all rows: temperature, top_p.
DRAWS = {"greedy": (0.0, 1.0), "drawn": (1.0, 1.0), "top-p 0.9": (1.0, 0.9)}


@torch.inference_mode()
def run(sheet: Sheet, bench: Bench) -> None:
    sheet.attempt("load", _load, bench, needs=60)
    measure(sheet, bench, [(rows, context) for context in bench.scale.contexts for rows in bench.scale.batches])
    for length in bench.scale.prompts:
        sheet.attempt(f"prompt of {length}", prompt, bench, length, needs=10)
    for rows in bench.scale.batches:
        sheet.attempt(f"draws, {rows} rows", draws, bench, rows)
    context = sorted(bench.scale.contexts)[:2][-1]
    for rows in sorted({bench.scale.batches[0], bench.scale.idle_batch}):
        sheet.attempt(f"kernels, {rows} rows", breakdown, bench, rows, context, needs=8)
    sheet.attempt("kernels, prompt", prompt_breakdown, bench, needs=8)


def measure(sheet: Sheet, bench: Bench, shapes: Any) -> None:
    for rows, context in shapes:
        sheet.attempt(f"{rows} x {context}", decode, bench, rows, context, needs=5)


def _load(bench: Bench) -> dict[str, Any]:
    steps = bench.steps()
    return {
        "kv_tokens": steps.kv_tokens, "weights": steps.weights + steps.head_weights,
        "free GiB": bench.gpu.free_bytes() / 2**30,
    }  # fmt: skip


def decode(bench: Bench, rows: int, context: int) -> dict[str, Any]:
    steps = bench.steps()
    if not steps.holds(rows, context):
        return {"skipped": f"{rows * context} tokens do not fit into {steps.kv_tokens}"}
    batch = steps.decode_batch(rows, context)
    seconds = bench.gpu.seconds(lambda: steps.decoder.forward(batch, steps.kv))
    floor = steps.decode_bytes(rows, context) / bench.rate("copy")
    return {"ms": seconds * 1e3, "floor_ms": floor * 1e3, "share": floor / seconds, "tokens/s": rows / seconds}


def prompt(bench: Bench, length: int) -> dict[str, Any]:
    steps = bench.steps()
    if not steps.holds(1, length):
        return {"skipped": f"{length} tokens do not fit"}
    batches = steps.prompt_batches(length)
    seconds = bench.gpu.seconds(lambda: steps.forward(batches))
    rate = steps.prompt_flops(length) / seconds
    return {
        "ms": seconds * 1e3, "TFLOP/s": rate / 1e12, "share": rate / bench.rate("products"),
        "tokens/s": length / seconds,
    }  # fmt: skip


def draws(bench: Bench, rows: int) -> dict[str, float]:
    """Milliseconds of a step's sampler, from its own graph."""
    steps = bench.steps()
    sampler, params = steps.sampler, steps.sampler._params
    size = sampler.size_for(rows)
    batch = sampler._batches[size]
    batch.padded[0].copy_(torch.arange(size))
    steps.decoder.logits.normal_(std=2.0)
    found = {}
    try:
        for name, (temperature, top_p) in DRAWS.items():
            params.temperature.fill_(temperature)
            params.top_p.fill_(top_p)
            found[f"{name} ms"] = bench.gpu.seconds(lambda: sampler._graphs.replay(size)) * 1e3
    finally:
        params.temperature.zero_()
        params.top_p.fill_(1.0)
    return found


def breakdown(bench: Bench, rows: int, context: int) -> dict[str, Any]:
    steps = bench.steps()
    batch = steps.decode_batch(rows, context)
    steps.decoder.forward(batch, steps.kv)
    return {"context": context, **summary(bench.gpu.kernels(lambda: steps.decoder.forward(batch, steps.kv)))}


def prompt_breakdown(bench: Bench) -> dict[str, Any]:
    steps = bench.steps()
    batches = steps.prompt_batches(bench.scale.prompts[0])
    steps.forward(batches)
    return summary(bench.gpu.kernels(lambda: steps.forward(batches)))


def summary(kernels: list[Kernel]) -> dict[str, Any]:
    """Busy and idle time, and the kernels that took longest."""
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.us)
    first = min((each.start_us for each in kernels), default=0.0)
    last = max((each.start_us + each.us for each in kernels), default=0.0)
    top = sorted(times, key=lambda name: -sum(times[name]))[:TOP]
    return {
        "launches": len(kernels), "busy_us": busy_us(kernels), "span_us": last - first,
        "top": [
            {"name": name[:100], "us": round(sum(times[name]), 1), "count": len(times[name])} for name in top
        ],
    }  # fmt: skip
