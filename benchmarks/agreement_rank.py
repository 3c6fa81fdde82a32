"""One rank of `benchmarks.agreement`: it agrees and meets the others, and rank 0 writes down what that takes."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch

from backend_lib.arena import Arena, Doorbell
from backend_lib.config import Settings
from backend_lib.worker.__main__ import parse_arguments
from backend_lib.worker.agreement import Agreement, FollowingAgreement, LeadingAgreement, Outlook
from backend_lib.worker.broadcast import BroadcastFollower, BroadcastLeader
from backend_lib.worker.process_groups import RankGroup, join

KINDS = ("meet", "arena", "broadcast")
OUT, STEPS, ROUNDS = "TANDEM_BENCH_OUT", "TANDEM_BENCH_STEPS", "TANDEM_BENCH_ROUNDS"


def main() -> None:
    args = parse_arguments()
    arena = Arena.attach(args.arena)
    settings = Settings(**arena.config["settings"])
    device = torch.device("cuda" if settings.device == "cuda" else "cpu")
    bells = [Doorbell(fd) for fd in args.bells]
    ranks = join(arena.status(0, 0), bells, args.rank, settings.tensor_parallel, device)
    assert isinstance(ranks, RankGroup)
    agreements = _agreements(arena, ranks, bells)
    arena.status(0, args.rank).set_ready(1)
    number = torch.zeros(1, device=device)
    took: dict[str, list[float]] = defaultdict(list)
    for _ in range(int(os.environ[ROUNDS])):
        for kind in KINDS:
            agreement = agreements.get(kind)
            took[kind].append(statistics.median(_steps(agreement, ranks, number)))
            if agreement:
                agreement.announce(busy=False)
    torch.distributed.destroy_process_group()
    if args.rank == 0:
        Path(os.environ[OUT]).write_text(json.dumps(took))


def _steps(agreement: Agreement | None, ranks: RankGroup, number: torch.Tensor) -> list[float]:
    """Microseconds of each."""
    took = []
    for _ in range(int(os.environ[STEPS])):
        started = time.perf_counter()
        if agreement:
            agreement.applied(agreement.receive(block=False))
            agreement.announce(busy=True)
        ranks.all_reduce(number)
        if number.is_cuda:
            torch.cuda.synchronize()
        took.append(1e6 * (time.perf_counter() - started))
    return took


def _agreements(arena: Arena, ranks: RankGroup, bells: list[Doorbell]) -> dict[str, Agreement]:
    ring, decisions, rank = arena.ring(0), arena.decisions(0), ranks.rank
    if rank:
        following = FollowingAgreement(ring, bells, decisions, rank)
        return {"arena": following, "broadcast": BroadcastFollower(following, ranks)}
    leading = LeadingAgreement(Outlook(ring), bells, decisions, patience=60)
    return {"arena": leading, "broadcast": BroadcastLeader(leading, ranks)}


if __name__ == "__main__":
    main()
