"""What agreement costs a step: through the arena and by a broadcast, beside each other in one run.

First the means alone: real processes that do nothing but agree and then meet in an all-reduce of one number, as they do
in a step's first product; the cost is what a step takes beyond one that only meets. Then the whole loop on a model that
computes nothing: what a step of 8 rows takes with one rank, and with several by either means (sampled ids travel too).
Means take turns, round after round, and medians over rounds are told.

    python -m benchmarks.agreement [--ranks 2 4] [--steps 2000] [--rounds 5] [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.agreement_rank import KINDS, OUT, ROUNDS, STEPS
from tests.support.checkpoints import make_hash_checkpoint
from tests.support.played import PlayedGroup, played_group

MEANS = ("arena", "broadcast")
ROWS, TOKENS = 8, 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_hash_checkpoint(folder, vocab_size=512, eos_token_id=0, max_position=1024)
        print("| ranks | meeting alone, us | arena adds, us | broadcast adds, us |\n| --- | --- | --- | --- |")
        for ranks in args.ranks:
            took = means_alone(folder, ranks, args)
            alone = took["meet"]
            print(f"| {ranks} | {alone:.0f} | {took['arena'] - alone:.0f} | {took['broadcast'] - alone:.0f} |")
        print("\n| ranks | whole loop, arena, us a step | broadcast |\n| --- | --- | --- |")
        for ranks in [1, *args.ranks]:
            rounds = {means: [whole_loop(folder, ranks, means) for _ in range(args.rounds)] for means in MEANS}
            print(f"| {ranks} | {' | '.join(f'{statistics.median(rounds[means]):.0f}' for means in MEANS)} |")


def means_alone(folder: Path, ranks: int, args: argparse.Namespace) -> dict[str, float]:
    """Median microseconds of a step on rank 0, by kind."""
    out = folder / f"agreement-{ranks}.json"
    os.environ |= {OUT: str(out), STEPS: str(args.steps), ROUNDS: str(args.rounds)}
    device = {"device": args.device}
    group = PlayedGroup(str(folder), num_slots=4, max_len=64, max_tokens=8, tensor_parallel=ranks, **device)
    try:
        group.start(modules=dict.fromkeys(range(ranks), "benchmarks.agreement_rank"))
        for process in group.processes:
            process.wait(600)
    finally:
        group.close()
    rounds = json.loads(out.read_text())
    return {kind: statistics.median(rounds[kind]) for kind in KINDS}


def whole_loop(folder: Path, ranks: int, means: str) -> float:
    """Microseconds of a step of `ROWS` rows."""
    size = {"num_slots": ROWS, "max_len": TOKENS + 8, "max_tokens": TOKENS, "max_running": ROWS}
    with played_group(folder, tensor_parallel=ranks, agreement=means, **size) as group:
        group.wait_released([group.admit(slot, [slot + 1], 8) for slot in range(ROWS)])
        before, started = group.arena.status(0, 0).load.step, time.perf_counter()
        group.wait_released([group.admit(slot, [slot + 1], TOKENS) for slot in range(ROWS)])
        seconds = time.perf_counter() - started
        return 1e6 * seconds / (group.arena.status(0, 0).load.step - before)


if __name__ == "__main__":
    main()
