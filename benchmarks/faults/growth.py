"""Whether anything grows over a long run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.faults.samples import Sample

WARM_UP = 0.25  # share of the run that is left out: caches fill, threads start
NOTABLE = 0.03  # share of a value by which it must have grown to be worth a word
COUNTERS = ("restarts",)  # which can only grow
FEWEST = 8  # samples below which nothing is said


class Trend(NamedTuple):
    """`first` and `last` are medians of the earlier and the later half, `per_hour` is the slope of the line between."""

    name: str
    first: float
    last: float
    per_hour: float
    grows: bool


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Of every value, over the samples after the warm-up."""
    kept = samples[int(len(samples) * WARM_UP) :]
    names = sorted({name for sample in kept for name in sample.values} - set(COUNTERS))
    return [trend(name, [(s.seconds, s.values[name]) for s in kept if name in s.values]) for name in names]


def trend(name: str, points: Sequence[tuple[float, float]]) -> Trend:
    """Grows: the later half lies above the earlier one by more than a trifle and by more than either half scatters."""
    half = len(points) // 2
    values = [value for _, value in points]
    early, late = values[:half] or values, values[half:]
    first, last = statistics.median(early), statistics.median(late)
    slope = float(np.polyfit(*np.array(points).T, 1)[0]) * 3600 if len(points) > 1 else 0.0
    scatter = max(_scatter(early), _scatter(late))
    grows = len(points) >= FEWEST and slope > 0 and last - first > max(scatter, NOTABLE * abs(first))
    return Trend(name, first, last, slope, grows)


def _scatter(values: Sequence[float]) -> float:
    """The middle half's width."""
    low, high = np.percentile(values, (25, 75))
    return float(high - low)


def table(found: Sequence[Trend]) -> str:
    lines = [f"{'':24} {'early':>10} {'late':>10} {'per hour':>10}"]
    for each in found:
        word = "  GROWS" if each.grows else ""
        lines.append(f"{each.name:24} {each.first:10.1f} {each.last:10.1f} {each.per_hour:+10.1f}{word}")
    return "\n".join(lines)
