"""The figures as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.summary import Percentiles, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BUSY_CLIENT = 0.8  # share of a core from which the client's own work can be seen in the latencies
_SHORT = 1.0  # seconds; the share of a shorter level is that of setting up


def table(summaries: Sequence[Summary]) -> str:
    """Right-aligned columns; latencies are p50 / p90 / p99 in milliseconds."""
    kind = summaries[0].kind
    columns: dict[str, Callable[[Summary], str]] = {
        kind: lambda s: f"{s.level:g}",
        "requests": lambda s: str(s.requests),
        "failed": lambda s: str(s.failed),
        "tokens in": lambda s: _number(s.mean_input_tokens),
        "out": lambda s: _number(s.mean_output_tokens),
        "requests/s": lambda s: _number(s.requests_per_s),
        "output tok/s": lambda s: _number(s.output_tokens_per_s),
        "total tok/s": lambda s: _number(s.total_tokens_per_s),
        "TTFT ms": lambda s: _percentiles(s.ttft_ms),
        "inter-token ms": lambda s: _percentiles(s.inter_token_ms),
        "end-to-end ms": lambda s: _percentiles(s.end_to_end_ms),
        **({"sent late ms": lambda s: _percentiles(s.send_delay_ms)} if kind == "rate" else {}),
        "client CPU": lambda s: f"{s.client_cpu:.0%}",
    }
    rows = [list(columns), *([show(summary) for show in columns.values()] for summary in summaries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def remarks(summaries: Sequence[Summary]) -> list[str]:
    """What a reader of the table must know: errors, and a client that was too busy to measure."""
    lines = []
    for summary in summaries:
        name = f"{summary.kind} {summary.level:g}"
        lines += [f"{name}: {count} failed: {message}" for message, count in summary.errors.items()]
        if summary.client_cpu > BUSY_CLIENT and summary.seconds > _SHORT:
            lines.append(f"{name}: the client used {summary.client_cpu:.0%} of a core; it may be the bottleneck")
    return lines


def write_json(path: Path, arguments: Mapping[str, Any], summaries: Sequence[Summary]) -> None:
    content = {"arguments": arguments, "levels": [asdict(summary) for summary in summaries]}
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def write_plot(path: Path, summaries: Sequence[Summary]) -> None:
    """Throughput and latency against the level. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    throughput, first, between = figure.subplots(1, 3)
    levels = [summary.level for summary in summaries]
    throughput.plot(levels, [summary.output_tokens_per_s for summary in summaries], "o-")
    throughput.set_ylabel("output tokens/s")
    _latency(first, levels, [summary.ttft_ms for summary in summaries], "time to first token, ms")
    _latency(between, levels, [summary.inter_token_ms for summary in summaries], "inter-token latency, ms")
    for axes in (throughput, first, between):
        axes.set_xlabel("requests/s" if summaries[0].kind == "rate" else "concurrency")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _latency(axes: Axes, levels: Sequence[float], values: Sequence[Percentiles | None], label: str) -> None:
    for name in ("p50", "p90", "p99"):
        axes.plot(levels, [getattr(value, name, float("nan")) for value in values], "o-", label=name)
    axes.set_ylabel(label)
    axes.legend()


def _number(value: float) -> str:
    """Three digits that count, and no fraction of what is large."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _percentiles(value: Percentiles | None) -> str:
    return " / ".join(map(_number, (value.p50, value.p90, value.p99))) if value else "-"
