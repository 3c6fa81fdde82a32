"""What was measured of one engine, round by round, and what is told of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.rivals.memory import Memory
from benchmarks.rivals.peer import Peer
from benchmarks.rivals.reference import Rates
from benchmarks.rivals.waves import WaveFigures

SLOW = 0.75  # of the best matmul rate of the run, below which the machine is in a slow phase


@dataclass
class Round:
    """One start of an engine. What an error cut off is missing."""

    before: Rates
    after: Rates | None = None
    ready_seconds: float | None = None
    command: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # as far as the engine says them itself
    waves: dict[int, list[WaveFigures]] = field(default_factory=dict)  # by concurrency
    prefill: list[float] = field(default_factory=list)
    memory: Memory | None = None
    error: str = ""

    @property
    def rate(self) -> float:
        """fp32 GFLOP/s, the lower of before and after."""
        return min(rates.matmul_gflop_s["fp32"] for rates in (self.before, self.after) if rates)


class Row(NamedTuple):
    """Medians of an engine's rounds, by column; None where nothing was measured."""

    peer: Peer
    values: Mapping[str, float | None]
    num_rounds: int
    slow: bool  # all of its rounds fell in slow phases
    error: str


class Column(NamedTuple):
    higher_is_better: bool
    values: Callable[[Round], Iterable[float]]


def columns(concurrency: Iterable[int]) -> dict[str, Column]:
    """In the order of the table."""
    found = {"ready s": Column(False, lambda each: _known(each.ready_seconds))}
    kinds = {"tok/s": ("tokens_per_s", True), "TTFT ms": ("ttft_ms", False), "ITL ms": ("inter_token_ms", False)}
    for name, (attribute, higher) in kinds.items():
        for count in concurrency:
            found[f"{name} @{count}"] = Column(higher, _of_waves(count, attribute))
    found["prefill tok/s"] = Column(True, lambda each: each.prefill)
    found["rest MiB"] = Column(False, lambda each: _known(each.memory and each.memory.now))
    found["peak MiB"] = Column(False, lambda each: _known(each.memory and each.memory.peak))
    return found


def _of_waves(count: int, attribute: str) -> Callable[[Round], list[float]]:
    return lambda each: [getattr(wave, attribute) for wave in each.waves.get(count, [])]


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]


def is_slow(each: Round, best: float) -> bool:
    return each.rate < SLOW * best


def summarize(peer: Peer, rounds: list[Round], best: float, table: Mapping[str, Column]) -> Row:
    """`best`: the best fp32 rate of the run. Rounds in slow phases count only where there are no others."""
    steady = [each for each in rounds if not is_slow(each, best)]
    used = [each for each in steady if each.waves] or [each for each in rounds if each.waves]
    values = {name: _median(value for each in used for value in column.values(each)) for name, column in table.items()}
    errors = [each.error for each in rounds if each.error]
    slow = bool(used) and not any(each in steady for each in used)
    return Row(peer, values, len(used), slow, errors[0] if errors else "")


def best_rate(rounds: Iterable[Round]) -> float:
    return max((r.matmul_gflop_s["fp32"] for each in rounds for r in (each.before, each.after) if r), default=0.0)


def ratios(rows: list[Row], table: Mapping[str, Column], own: str) -> dict[str, float | None]:
    """Of each column: the row named `own` to the best of the others, so that above 1 is better for every column."""
    (mine,) = (row for row in rows if row.peer.name == own)
    return {name: _ratio(name, column.higher_is_better, mine, rows) for name, column in table.items()}


def _ratio(name: str, higher_is_better: bool, mine: Row, rows: list[Row]) -> float | None:
    own = mine.values[name]
    # Where its own figures are of a slow phase as well, nothing is better than to compare them with all.
    comparable = [row for row in rows if row.peer.family and (mine.slow or not row.slow)]
    others = [row.values[name] for row in comparable if row.values[name]]
    if not own or not others:
        return None
    return own / max(others) if higher_is_better else min(others) / own


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
