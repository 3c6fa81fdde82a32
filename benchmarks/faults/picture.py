"""A long run as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.samples import Sample

_PANELS = {
    "memory, MiB": ("tritonserver MiB", "router MiB", "worker MiB"),
    "descriptors": ("tritonserver descriptors", "router descriptors", "worker descriptors"),
    "threads": ("tritonserver threads", "router threads", "worker threads"),
    "requests": ("running", "waiting", "paused"),
    "KV tokens in use": ("KV tokens",),
    "worker restarts": ("restarts",),
    "time to first token, ms": ("TTFT p50 ms", "TTFT p99 ms"),
    "inter-token latency, ms": ("inter-token p50 ms", "inter-token p99 ms"),
    "per second": ("requests/s", "tokens/s"),
}


def write_plot(path: Path, samples: Sequence[Sample]) -> None:
    """Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 10), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(3, 3).flat, _PANELS.items(), strict=True):
        for name in names:
            points = [(sample.seconds / 60, sample.values[name]) for sample in samples if name in sample.values]
            axes.plot([minute for minute, _ in points], [value for _, value in points], label=name)
        axes.set_title(title)
        axes.set_xlabel("minutes")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)
