"""The comparison as a table (text or Markdown), as JSON and as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rivals.floors import Floor
from benchmarks.rivals.results import Column, Row

Cells = list[list[str]]


def result_cells(rows: Sequence[Row], table: Mapping[str, Column], ratios: Mapping[str, Mapping[str, Any]]) -> Cells:
    """A line for each engine, and one for each Tandem's ratios, in which above 1 is better whatever the column."""
    cells = [["engine", "weights", *table]]
    for row in rows:
        cells.append([marked(row), row.peer.weights.label, *(number(row.values[column]) for column in table)])
    for name, found in ratios.items():
        cells.append([f"{name} / best other", "", *(_times(found[column]) for column in table)])
    return cells


def floor_cells(rows: Sequence[Row], floors: Mapping[str, Mapping[str, Floor]], concurrency: Sequence[int]) -> Cells:
    """`floors`: by engine and operands. Each cell has the floor and the share of it that was reached."""
    head = ["engine", "operands", "decode tok/s", "prefill tok/s", *(f"wave of {count} tok/s" for count in concurrency)]
    cells = [head]
    for row in rows:
        for operands, floor in floors.get(row.peer.name, {}).items():
            decode, prefill = decode_rate(row), row.values["prefill tok/s"]
            waves = [_share(row.values[f"tok/s @{count}"], floor.waves[count]) for count in concurrency]
            shares = [_share(decode, floor.decode), _share(prefill, floor.prefill), *waves]
            cells.append([row.peer.name, operands, *shares])
    return cells


def decode_rate(row: Row) -> float | None:
    """Tokens a second of one sequence once it decodes."""
    gap = row.values.get("ITL ms @1")
    return 1e3 / gap if gap else None


def remarks(rows: Sequence[Row]) -> list[str]:
    lines = [f"{row.peer.name}: {row.error}" for row in rows if row.error]
    lines += [f"{row.peer.name}: {row.peer.note}" for row in rows if row.peer.note]
    if any(row.slow for row in rows):
        lines.append("*: measured only while the machine was slow; not comparable")
    return lines


def text_table(cells: Cells) -> str:
    """Names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    )


def markdown_table(cells: Cells) -> str:
    rule = ["---", "---", *["--:"] * (len(cells[0]) - 2)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [cells[0], rule, *cells[1:]])


def write_markdown(path: Path, heading: str, tables: Mapping[str, Cells], notes: Sequence[str]) -> None:
    parts = [heading, *(f"{title}\n\n{markdown_table(cells)}" for title, cells in tables.items())]
    parts.append("\n".join(f"- {note}" for note in notes))
    path.write_text("\n\n".join(part for part in parts if part) + "\n")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def write_plot(path: Path, rows: Sequence[Row], concurrency: Sequence[int]) -> None:
    """Throughput by concurrency, prefill and memory. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if any(row.values.values())]
    names = [*(f"tok/s @{count}" for count in concurrency), "prefill tok/s", "rest MiB"]
    figure = Figure(figsize=(3.4 * len(names), 1.2 + 0.4 * len(shown)), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
        colours = ["tab:gray" if row.peer.family else "tab:red" for row in shown]
        bars = axes.barh([marked(row) for row in shown], [row.values[name] or 0 for row in shown], color=colours)
        axes.bar_label(bars, [number(row.values[name]) for row in shown], padding=2, fontsize="small")
        axes.margins(x=0.2)
        axes.set_title(name)
        axes.invert_yaxis()
    figure.savefig(path, dpi=110)


def marked(row: Row) -> str:
    return row.peer.name + ("*" if row.slow else "")


def number(value: float | None) -> str:
    """Three digits that count, and no fraction of what is large; - for nothing."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}×"


def _share(value: float | None, floor: float | None) -> str:
    if floor is None:
        return "-"
    return f"{number(floor)} ({value / floor:.0%})" if value else number(floor)
