"""What only a GPU has: events, graphs, its profiler. `Cpu` stands in for it where there is none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]
_ROUNDS = 5


class Kernel(NamedTuple):
    name: str
    start_us: float
    us: float


class Gpu:
    device = torch.device("cuda")
    backend = "nccl"
    settings = "cuda"  # the setting `device` of a worker

    def description(self) -> dict[str, Any]:
        properties = torch.cuda.get_device_properties(0)
        return {
            "gpu": properties.name, "sm": 10 * properties.major + properties.minor,
            "multiprocessors": properties.multi_processor_count, "GiB": properties.total_memory / 2**30,
            "cuda": torch.version.cuda, "driver": _driver(),
        }  # fmt: skip

    def synchronise(self) -> None:
        torch.cuda.synchronize()

    def is_alive(self) -> bool:
        try:
            torch.cuda.synchronize()
            return bool(torch.ones(1, device="cuda").item() == 1)
        except RuntimeError:
            return False

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def seconds(self, call: Call, *, least: float = 0.03) -> float:
        """Of one call, by events: the median of five rounds of calls that follow each other without a gap."""
        call()
        count = max(1, round(least / max(self._round(call, 1), 1e-6)))
        return statistics.median(self._round(call, count) for _ in range(_ROUNDS))

    def _round(self, call: Call, count: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    def capture(self, call: Call) -> Call:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay

    def kernels(self, call: Call) -> list[Kernel]:
        """What ran on the device during a call, copies included."""
        return _profiled(call, [ProfilerActivity.CUDA], self.synchronise, "CUDA")


class Cpu:
    """Its times say nothing: they are those of Triton's interpreter."""

    device = torch.device("cpu")
    backend = "gloo"
    settings = "interpret"

    def description(self) -> dict[str, Any]:
        return {"gpu": "none: times mean nothing"}

    def synchronise(self) -> None: ...

    def is_alive(self) -> bool:
        return True

    def free_bytes(self) -> int:
        return 1 << 40

    def seconds(self, call: Call, *, least: float = 0.0) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def capture(self, call: Call) -> Call:
        return call

    def kernels(self, call: Call) -> list[Kernel]:
        return _profiled(call, [ProfilerActivity.CPU], self.synchronise, "CPU")


def find(*, is_dry: bool) -> Gpu | Cpu:
    return Cpu() if is_dry else Gpu()


def _profiled(call: Call, activities: list[Any], synchronise: Call, kind: str) -> list[Kernel]:
    synchronise()
    with profile(activities=activities) as profiler:
        call()
        synchronise()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events()
        if event.device_type.name == kind
    ]


def busy_us(kernels: list[Kernel]) -> float:
    """Time in which at least one of them ran."""
    busy = end = 0.0
    for kernel in sorted(kernels, key=lambda each: each.start_us):
        stop = kernel.start_us + kernel.us
        busy += max(stop - max(kernel.start_us, end), 0.0)
        end = max(end, stop)
    return busy


def _driver() -> str:
    from subprocess import check_output

    try:
        return check_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True).strip()
    except (OSError, ValueError, RuntimeError) as error:
        return f"unknown: {error}"
