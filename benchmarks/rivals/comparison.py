"""From engines to tables: measure, summarise, hold against the machine's floors, write."""

from __future__ import annotations

import argparse
import contextlib
import signal
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.rivals import report
from benchmarks.rivals.floors import Floor, Lengths, Shape, floor
from benchmarks.rivals.machine import describe
from benchmarks.rivals.measure import Plan, Run
from benchmarks.rivals.peer import Peer, Setup
from benchmarks.rivals.prompts import Prompts
from benchmarks.rivals.reference import Rates
from benchmarks.rivals.results import Round, Row, columns, ratios, summarize

_RULE = "Each figure is a median; in the line of ratios more than 1 is better in every column."


def compare(args: argparse.Namespace, peers: Sequence[Peer], setup: Setup) -> int:
    """The exit code: 1 when an engine has no figures or an error."""
    from backend_lib.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(setup.model)
    plan = Plan(
        concurrency=args.concurrency, prompt_tokens=args.prompt_tokens, output_tokens=args.output_tokens,
        repeats=args.repeats, retries=args.retries, seed=args.seed, timeout=args.timeout,
    )  # fmt: skip
    encode = checkpoint.tokenizer.encode
    prompts = Prompts(lambda text: encode(text, add_special_tokens=False).ids)
    run = Run(plan, setup, prompts, known_rate=setup.home.known_rate())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # what was measured until then is told
        run.run(peers)
    setup.home.keep_rate(run.best_rate)
    comparison = Comparison(plan, peers, run, _shape(checkpoint.config))
    print(comparison.text())
    comparison.write(args, setup)
    return int(any(row.error for row in comparison.rows))


class Comparison:
    """What a run showed."""

    def __init__(self, plan: Plan, peers: Sequence[Peer], run: Run, shape: Shape) -> None:
        self._plan, self._run = plan, run
        self.table = columns(plan.concurrency)
        self.rows = [summarize(peer, run.rounds[peer.name], run.best_rate, self.table) for peer in peers]
        self.rates = best_rates([each for rounds in run.rounds.values() for each in rounds])
        own = [peer.name for peer in peers if not peer.family]
        self.ratios = {name: ratios(self.rows, self.table, name) for name in own}
        self.floors = {row.peer.name: self._floors(row.peer, shape) for row in self.rows}

    def _floors(self, peer: Peer, shape: Shape) -> dict[str, Floor]:
        lengths, waves = Lengths(self._plan.prompt_tokens, self._plan.output_tokens), list(self._plan.concurrency)
        return {
            operands: floor(shape, peer.weights, self.rates, operands, waves, lengths)
            for operands in self.rates.matmul_gflop_s
        }

    def tables(self) -> dict[str, report.Cells]:
        rates = ", ".join(f"{name} {value:.0f}" for name, value in self.rates.matmul_gflop_s.items())
        title = (
            f"Floors: {self.rates.read_gb_s:.1f} GB/s read, GFLOP/s of a matmul: {rates}. In brackets what was reached."
        )
        return {
            _RULE: report.result_cells(self.rows, self.table, self.ratios),
            title: report.floor_cells(self.rows, self.floors, self._plan.concurrency),
        }

    def notes(self) -> list[str]:
        slowest = min((each.rate for rounds in self._run.rounds.values() for each in rounds), default=0.0)
        return [
            *report.remarks(self.rows),
            f"fp32 matmul: {slowest:.0f} GFLOP/s at the slowest; the best of this machine is {self._run.best_rate:.0f}",
        ]

    def text(self) -> str:
        parts = [f"{title}\n{report.text_table(cells)}" for title, cells in self.tables().items()]
        return "\n\n".join([*parts, "\n".join(self.notes())])

    def write(self, args: argparse.Namespace, setup: Setup) -> None:
        report.write_json(args.json, self._content(args, setup))
        report.write_markdown(args.markdown, "# Engines compared", self.tables(), self.notes())
        report.write_plot(args.plot, self.rows, self._plan.concurrency)
        print(f"written: {args.json}, {args.markdown}, {args.plot}")

    def _content(self, args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
        return {
            "arguments": vars(args), "machine": describe(), "best rates": self.rates._asdict(),
            "rows": [_row(row, setup, self.floors[row.peer.name]) for row in self.rows], "ratios": self.ratios,
            "rounds": {name: [asdict(each) for each in rounds] for name, rounds in self._run.rounds.items()},
        }  # fmt: skip


def best_rates(rounds: Sequence[Round]) -> Rates:
    """What the machine could do in its best moments."""
    found = [rates for each in rounds for rates in (each.before, each.after) if rates]
    names = found[0].matmul_gflop_s if found else ()
    return Rates(
        max((rates.read_gb_s for rates in found), default=0.0),
        {name: max(rates.matmul_gflop_s[name] for rates in found) for name in names},
    )


def _row(row: Row, setup: Setup, floors: dict[str, Floor]) -> dict[str, Any]:
    stamp = setup.home.stamp(row.peer.family)
    packages = stamp.read_text().splitlines() if row.peer.family and stamp.exists() else []
    return {
        "engine": row.peer.name, "how": row.peer.how, "weights": row.peer.weights._asdict(), "packages": packages,
        "values": row.values, "rounds": row.num_rounds, "slow": row.slow, "error": row.error,
        "floors": {operands: each._asdict() for operands, each in floors.items()},
    }  # fmt: skip


def _shape(config: Any) -> Shape:
    return Shape.of_decoder(
        hidden=config.hidden_size, intermediate=config.intermediate_size, layers=len(config.layers),
        heads=config.num_heads, kv_heads=config.num_kv_heads, head_dim=config.head_dim, vocab=config.vocab_size,
    )  # fmt: skip
