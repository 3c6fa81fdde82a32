"""Hours of mixed load on a server of its own: does anything grow, does anything fail?

    python benchmarks/soak.py --minutes 60 --kill-every 20

Streams, draws, several sequences a prompt, cancels, disconnects, deadlines and mistakes, over gRPC and HTTP; with
--kill-every the worker gets SIGKILL every so many seconds. Every few seconds memory, descriptors and threads of each
process, the server's gauges and the clients' latencies are noted. docs/benchmarking.md says how to read the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

if not __package__:  # run as a file, which puts only its own folder on the path
    sys.path.insert(0, str(Path(__file__).parents[1]))

import tritonclient.grpc.aio as grpcaio

from benchmarks.faults.growth import Trend, table, trends
from benchmarks.faults.mixed_load import TIMEOUT, MixedLoad, Tally
from benchmarks.faults.picture import write_plot
from benchmarks.faults.samples import Sampler, worker_of
from benchmarks.serving.client import LoadClient
from benchmarks.serving.workload import WORDS_FILE, Lengths, Workload
from tests.support.disturbance import is_ready
from tests.support.server import RunningServer, running_server


def main() -> int:
    """The exit code: 1 when a request failed that should not have."""
    args = _parser().parse_args()
    settings = dict(each.partition("=")[::2] for each in args.set)
    asked, errors = Counter[str](), Counter[str]()
    with running_server(model=args.model, settings=settings, extra_flags=["--exit-timeout-secs=3"]) as server:
        sampler = Sampler(server)
        asyncio.run(soak(server, args, sampler, asked, errors))
    found = trends(sampler.samples)
    print(report(sampler, found, asked, errors))
    content = {
        "arguments": vars(args), "asked": asked, "errors": errors, "trends": [each._asdict() for each in found],
        "samples": [asdict(sample) for sample in sampler.samples],
    }  # fmt: skip
    for path in (args.json, args.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(content, indent=1, default=str) + "\n")
    write_plot(args.plot, sampler.samples)
    print(f"written: {args.json}, {args.plot}")
    return int(bool(errors))


async def soak(
    server: RunningServer, args: argparse.Namespace, sampler: Sampler, asked: Counter[str], errors: Counter[str]
) -> None:
    workload = Workload(
        input_tokens=args.input_tokens, output_tokens=args.output_tokens, words=args.words.read_text().split(),
        seed=args.seed,
    )  # fmt: skip
    async with grpcaio.InferenceServerClient(server.grpc_url) as connection:
        load = MixedLoad(LoadClient(connection, "llm", TIMEOUT), server.http_url, workload, args.seed)
        tasks = [asyncio.create_task(_kill(server, args.kill_every))] if args.kill_every else []
        running = asyncio.create_task(load.run(args.clients, args.minutes * 60))
        while not running.done():
            await asyncio.wait([running, *tasks], timeout=args.every, return_when=asyncio.FIRST_EXCEPTION)
            tally, load.tally = load.tally, Tally()
            asked += tally.answered
            errors += tally.errors
            await asyncio.to_thread(sampler.take, tally)
        for task in tasks:
            task.cancel()
        await running


async def _kill(server: RunningServer, seconds: float) -> None:
    """Not while it loads: a model that cannot be loaded five times in a row is rightly given up for a while."""
    while True:
        await asyncio.sleep(seconds)
        worker = await asyncio.to_thread(worker_of, server)
        if worker and is_ready(server, worker):
            worker.kill()


def report(sampler: Sampler, found: list[Trend], asked: Counter[str], errors: Counter[str]) -> str:
    last = sampler.samples[-1]
    kinds = ", ".join(f"{count} {kind}" for kind, count in asked.most_common())
    growing = [each.name for each in found if each.grows]
    lines = [
        table(found),
        f"{asked.total()} requests in {last.seconds / 60:.1f} minutes: {kinds}",
        f"{last.values.get('restarts', 0):.0f} restarts of the worker",
        f"{errors.total()} requests failed that should not have",
        *(f"  {count} times {message}" for message, count in errors.most_common(10)),
        f"growing: {', '.join(growing) or 'nothing'}",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the model")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="default: 10")
    parser.add_argument("--kill-every", type=float, metavar="S", help="kill the worker every so many seconds")
    parser.add_argument("--clients", type=int, default=8, metavar="N", help="at a time (default: 8)")
    parser.add_argument("--every", type=float, default=5.0, metavar="S", help="seconds between samples (default: 5)")
    for name, lengths in (("input", Lengths(16, 128)), ("output", Lengths(16, 128))):
        parser.add_argument(
            f"--{name}-tokens", type=Lengths.parse, default=lengths, metavar="N", help="default: 16:128"
        )
    parser.add_argument("--words", type=Path, default=WORDS_FILE, metavar="FILE", help="that prompts are made of")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("build/soak.json"), metavar="FILE")
    parser.add_argument("--plot", type=Path, default=Path("build/soak.png"), metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
