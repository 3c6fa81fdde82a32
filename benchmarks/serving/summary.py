"""Figures of one level from its traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.serving.client import Trace
from benchmarks.serving.load import Level


@dataclass(frozen=True)
class Percentiles:
    """Interpolated linearly between the two nearest values."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles | None:
        return cls(*(float(value) for value in np.percentile(values, (50, 90, 99)))) if len(values) else None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of one level. Latencies in milliseconds, over requests that were answered in full (inter-token: over tokens).

    Rates count what arrived within `seconds`: the duration that was asked for, else until the last answer.
    """

    kind: str
    level: float
    seconds: float
    requests: int
    failed: int
    errors: dict[str, int]
    mean_input_tokens: float
    mean_output_tokens: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Percentiles | None
    inter_token_ms: Percentiles | None
    end_to_end_ms: Percentiles | None
    send_delay_ms: Percentiles | None
    client_cpu: float  # share of one core


def summarize(
    level: Level, traces: Sequence[Trace], *, started: float, seconds: float | None, client_cpu: float
) -> Summary:
    """`started` is when the level began; `seconds` is None when the last answer ends it."""
    good = [trace for trace in traces if not trace.error]
    end = started + seconds if seconds else max((trace.times[-1] for trace in good), default=started)
    window = max(end - started, 1e-9)
    output = sum(_until(trace, end) for trace in good)
    inputs = sum(trace.input_tokens for trace in good if trace.times[0] <= end)
    return Summary(
        kind=level.kind,
        level=level.value,
        seconds=window,
        requests=len(traces),
        failed=len(traces) - len(good),
        errors=dict(Counter(trace.error for trace in traces if trace.error).most_common()),
        mean_input_tokens=_mean([trace.input_tokens for trace in good]),
        mean_output_tokens=_mean([sum(trace.tokens) for trace in good]),
        requests_per_s=sum(trace.times[-1] <= end for trace in good) / window,
        output_tokens_per_s=output / window,
        total_tokens_per_s=(inputs + output) / window,
        ttft_ms=_milliseconds([trace.ttft for trace in good]),
        inter_token_ms=_milliseconds([gap for trace in good for gap in trace.inter_token]),
        end_to_end_ms=_milliseconds([trace.end_to_end for trace in good]),
        send_delay_ms=_milliseconds([trace.started - trace.planned for trace in traces]),
        client_cpu=client_cpu,
    )


def _until(trace: Trace, end: float) -> int:
    """Tokens that came up to then."""
    return sum(tokens for time, tokens in zip(trace.times, trace.tokens, strict=True) if time <= end)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _milliseconds(seconds: Sequence[float]) -> Percentiles | None:
    return Percentiles.of([value * 1e3 for value in seconds])
