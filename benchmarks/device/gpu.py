"""Time, bandwidth and kernels of a GPU, with a stand-in on a CPU, where times mean nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile


class Interval(NamedTuple):
    """A kernel's run, in microseconds."""

    name: str
    start: float
    end: float


class Gpu:
    """The device that is checked."""

    def __init__(self) -> None:
        self.is_real = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.is_real else "cpu")
        self.dtype = torch.bfloat16 if self.is_real else torch.float32
        self.setting = "cuda" if self.is_real else "interpret"

    def about(self) -> dict[str, Any]:
        import triton

        found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "gpu": None}
        if self.is_real:
            about = torch.cuda.get_device_properties(self.device)
            found |= {
                "gpu": about.name, "capability": f"{about.major}.{about.minor}", "cuda": torch.version.cuda,
                "multiprocessors": about.multi_processor_count, "memory_gib": round(about.total_memory / 2**30, 1),
            }  # fmt: skip
        return found

    def wait(self) -> None:
        if self.is_real:
            torch.cuda.synchronize()

    def seconds(self, launch: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
        """Median of a launch, by events around each."""
        if not self.is_real:
            started = time.perf_counter()
            launch()
            return time.perf_counter() - started
        for _ in range(warm_up):
            launch()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for begin, end in pairs:
            begin.record()
            launch()
            end.record()
        torch.cuda.synchronize()
        return median(begin.elapsed_time(end) for begin, end in pairs) / 1e3

    def intervals(self, run: Callable[[], object]) -> list[Interval]:
        """The kernels and copies that ran on the GPU meanwhile; none on a CPU."""
        activities = [ProfilerActivity.CUDA] if self.is_real else [ProfilerActivity.CPU]
        self.wait()
        with profile(activities=activities) as profiler:
            run()
            self.wait()
        events = [event for event in profiler.events() or () if "cuda" in str(event.device_type).lower()]
        return [Interval(event.name, event.time_range.start, event.time_range.end) for event in events]

    def bandwidth(self) -> float:
        """Bytes a second of a large copy, those read and those written."""
        size = (4 << 30) if self.is_real else (1 << 20)
        source = torch.empty(size, dtype=torch.uint8, device=self.device).random_(0, 255)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source))

    def product_rate(self) -> float:
        """Operations a second of a large product of random values."""
        size = 8192 if self.is_real else 64
        left, right = (torch.randn(size, size, device=self.device).to(self.dtype) for _ in range(2))
        return 2 * size**3 / self.seconds(lambda: left @ right)

    def free_memory(self) -> int:
        return torch.cuda.mem_get_info()[0] if self.is_real else 1 << 30


def idle_share(intervals: list[Interval]) -> float:
    """Of the time from the first kernel's start to the last one's end, the share in which none ran."""
    if not intervals:
        return float("nan")
    busy, until = 0.0, float("-inf")
    for _, start, end in sorted(intervals, key=lambda each: each.start):
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    whole = until - min(each.start for each in intervals)
    return 1 - busy / whole


def by_kernel(intervals: list[Interval], steps: int, most: int = 14) -> list[dict[str, Any]]:
    """What takes longest, a step: microseconds and launches."""
    found: dict[str, list[float]] = {}
    for name, start, end in intervals:
        found.setdefault(name[:80], []).append(end - start)
    rows = [
        {"kernel": name, "us": round(sum(times) / steps, 2), "launches": len(times) / steps}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:most]
