"""Do streams keep their tokens while a worker is killed again and again? A real model, router and worker.

    python benchmarks/kills.py --kills 200 --json kills.json

Requests run undisturbed first, then, so many at a time, while a worker gets SIGKILL at random moments: 0.2 to 3 s
after every stream flows again, and some while the next worker loads. Token ids are compared one by one. Where an
answer first differs, the margin between the two tokens' scores is computed with the model's own forward on what they
have in common; a margin below 1e-3 is what rounding may turn, any other is a wrong token. docs/benchmarking.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

if not __package__:  # run as a file, which puts only its own folder on the path
    sys.path.insert(0, str(Path(__file__).parents[1]))

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import load_decoder
from backend_lib.router.router import Router
from benchmarks.faults.killer import Killer, Stall
from benchmarks.faults.margins import BOUND, Difference, compare
from benchmarks.faults.requests import Question, Round, make_questions

Ids = tuple[list[int], list[int]]  # of the prompt and of the output


@dataclass
class Figures:
    seconds: float
    kills: int
    loading_kills: int
    requests: int
    tokens: int
    lost: list[str]
    differences: list[Difference]
    stalls: list[Stall]

    @property
    def wrong(self) -> list[Difference]:
        return [each for each in self.differences if each.is_wrong]


def main() -> int:
    """The exit code: 1 when a request was lost or a token is wrong."""
    args = _parser().parse_args()
    questions = make_questions(args.prompts, args.seed)
    with _router(args.model, args.streams, args.ranks) as router:
        expected = undisturbed(router, questions, args.streams)
        print(f"undisturbed: {len(expected)} requests, {sum(len(ids[1]) for ids in expected)} tokens", flush=True)
        figures = disturbed(router, questions, expected, args)
    print(report(figures))
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args)} | asdict(figures), indent=1, default=str) + "\n")
    return int(bool(figures.lost or figures.wrong))


def undisturbed(router: Router, questions: list[Question], streams: int) -> list[Ids]:
    ids: list[Ids] = []
    for begin in range(0, len(questions), streams):
        asked = Round(router, questions[begin : begin + streams])
        for each in asked.running:
            each.sender.wait(600)
            assert each.sender.error is None, each.sender.error
        ids += asked.token_ids()
    return ids


def disturbed(router: Router, questions: list[Question], expected: list[Ids], args: argparse.Namespace) -> Figures:
    """Rounds of `streams` requests, taken in turn, until there have been enough kills."""
    rng, started = random.Random(args.seed), time.monotonic()
    killer = Killer(router, args.kills, rng)
    answers: list[tuple[int, list[int]]] = []
    lost: list[str] = []
    while killer.kills < args.kills:
        numbers = rng.sample(range(len(questions)), args.streams)
        asked = Round(router, [questions[number] for number in numbers])
        killer.run(asked)
        lost += losses(asked)
        answers += [(number, ids) for number, (_, ids) in zip(numbers, asked.token_ids(), strict=True)]
        print(f"{killer.kills} kills, {len(answers)} requests, {len(lost)} lost", flush=True)
        if not asked.is_over:  # the next round's slots would be mixed up with this one's
            break
    seconds = time.monotonic() - started
    decoder = load_decoder(open_checkpoint(args.model), Settings(model=args.model))
    compared = (compare(decoder, n, questions[n], *expected[n], got) for n, got in answers)
    differences = [each for each in compared if each]
    tokens = sum(len(got) for _, got in answers)
    return Figures(
        seconds, killer.kills, killer.loading_kills, len(answers), tokens, lost, differences, killer.stalls
    )  # fmt: skip


def losses(asked: Round) -> list[str]:
    """What became of the requests that were not answered, or answered in a way that is not allowed."""
    words = []
    for each in asked.running:
        sender = each.sender
        if not sender.done.is_set():
            words.append(f"stands still after {sender.num_tokens} of {each.question.max_tokens} tokens")
        elif sender.error or sender.faults or sender.num_tokens != each.question.max_tokens:
            words.append(f"{sender.error} {sender.faults} {sender.num_tokens} of {each.question.max_tokens} tokens")
    return words


def report(figures: Figures) -> str:
    plain = [each for each in figures.stalls if not each.loading_kills]
    chained = [each for each in figures.stalls if each.loading_kills]
    colon = ":" if figures.differences else ""
    lines = [
        f"{figures.kills} kills in {figures.seconds:.0f} s, {figures.loading_kills} of them of a worker that loaded",
        f"{figures.requests} requests, {figures.tokens} tokens, {len(figures.lost)} requests lost",
        f"{len(figures.wrong)} wrong tokens; {len(figures.differences)} first differences in all{colon}",
        *(f"  {_difference(each)}" for each in figures.differences),
        f"seconds from the kill: {_stalls(plain)}",
        f"seconds from the last of several kills, each of the next worker while it loaded: {_stalls(chained)}",
        *(f"lost: {words}" for words in figures.lost),
    ]
    return "\n".join(lines)


def _difference(each: Difference) -> str:
    verdict = "WRONG" if each.is_wrong else f"below {BOUND:g}"
    tokens = f"token {each.position} is {each.got}, undisturbed {each.expected}"
    return f"request {each.request}: {tokens}, margin {each.margin:.2e}, {verdict}"


def _stalls(stalls: list[Stall]) -> str:
    if not stalls:
        return "none"
    parts = []
    for name in ("first", "every"):
        values = [getattr(each, name) for each in stalls]
        which = "some stream" if name == "first" else "every stream"
        parts.append(f"{which} {statistics.median(values):.2f} p50, {max(values):.2f} max")
    return f"{'; '.join(parts)} ({len(stalls)} times)"


@contextmanager
def _router(model: str, streams: int, ranks: int) -> Iterator[Router]:
    router = Router(Settings(model=model, max_running=streams, tensor_parallel=ranks))
    try:
        yield router
    finally:
        router.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kills", type=int, default=20, metavar="N")
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="at a time (default: 16)")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="that share the weights; any of them is killed"
    )
    parser.add_argument("--prompts", type=int, default=64, metavar="N", help="different requests (default: 64)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, draws and moments (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
