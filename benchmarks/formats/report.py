"""Results as a table, as text or Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.formats.subject import Result

COLUMNS = [
    "weights", "perplexity", "rise, %", "logits off by, mean", "p99", "KL, nats", "same argmax, %", "MB a token",
    "resident, MB", "load, s", "prefill, tokens/s (noisy)",
]  # fmt: skip


def cells(result: Result) -> list[str]:
    quality, costs = result.quality, result.costs
    return [
        result.name,
        f"{quality.perplexity:.3f}",
        f"{100 * quality.perplexity_rise:+.2f} ± {100 * quality.rise_error:.2f}",
        f"{quality.mean_difference:.4f}",
        f"{quality.p99_difference:.4f}",
        f"{quality.divergence:.2g}",
        f"{100 * quality.same_argmax:.2f}",
        "–" if costs.read_bytes is None else f"{costs.read_bytes / 1e6:.0f}",
        f"{costs.resident_bytes / 1e6:.0f}",
        f"{costs.load_seconds:.1f}",
        f"{result.tokens_per_second:.0f}",
    ]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        aligned = [each.rjust(width) for each, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *aligned]))
    return "\n".join(lines)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *body])
