"""The command line of `benchmarks/serve.py`."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tritonclient.grpc.aio as grpcaio

from benchmarks.serving.client import LoadClient
from benchmarks.serving.load import Extent, Level, run_load
from benchmarks.serving.progress import Progress
from benchmarks.serving.report import remarks, table, write_json, write_plot
from benchmarks.serving.summary import Summary, summarize
from benchmarks.serving.workload import WORDS_FILE, Lengths, LoadRequest, Workload, read_lines

_WARMUP_TOKENS = 8
_REQUESTS_PER_CLIENT = 4
_REQUESTS_AT_A_RATE = 32


def main(arguments: Sequence[str] | None = None, description: str | None = None) -> int:
    """The exit code: 1 when all requests of some level failed."""
    parser = _parser(description)
    args = parser.parse_args(arguments)
    try:
        workload = _workload(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib: pip install matplotlib")
    summaries = [asyncio.run(measure(level, args, workload)) for level in _levels(args)]
    print(table(summaries))
    for line in remarks(summaries):
        print(line, file=sys.stderr)
    if args.json:
        write_json(args.json, vars(args), summaries)
    if args.plot:
        write_plot(args.plot, summaries)
    return int(any(0 < summary.requests == summary.failed for summary in summaries))


async def measure(level: Level, args: argparse.Namespace, workload: Workload) -> Summary:
    extent = Extent(None, args.duration) if args.duration else Extent(_num_requests(level, args), None)
    async with grpcaio.InferenceServerClient(args.url) as connection:
        client = LoadClient(connection, args.model, args.timeout)
        await _warm_up(client, workload, args.warmup, str(level))
        progress = Progress(str(level), extent.requests, extent.seconds)
        ask, requests = partial(client.ask, progress=progress), workload.requests(str(level))
        started, cpu = time.perf_counter(), time.process_time()
        traces = await run_load(level, extent, requests, ask, max_outstanding=args.max_outstanding, seed=args.seed)
        share = (time.process_time() - cpu) / (time.perf_counter() - started)
        progress.close()
    return summarize(level, traces, started=started, seconds=extent.seconds, client_cpu=share)


async def _warm_up(client: LoadClient, workload: Workload, count: int, level: str) -> None:
    """Unmeasured requests with few tokens. Ends the program when one fails: so would the rest."""
    for number in range(count):
        text, sampling = workload.request(f"warm-up of {level}", number)
        few = {**sampling, "max_tokens": min(sampling["max_tokens"], _WARMUP_TOKENS)}
        trace = await client.ask(LoadRequest(text, few), time.perf_counter(), Progress("warm-up", count, None))
        if trace.error:
            raise SystemExit(f"the warm-up request failed: {trace.error}")


def _num_requests(level: Level, args: argparse.Namespace) -> int:
    default = _REQUESTS_PER_CLIENT * int(level.value) if level.kind == "concurrency" else _REQUESTS_AT_A_RATE
    return args.requests or default


def _levels(args: argparse.Namespace) -> list[Level]:
    if args.rate:
        return [Level("rate", rate) for rate in args.rate]
    return [Level("concurrency", clients) for clients in args.concurrency]


def _workload(args: argparse.Namespace) -> Workload:
    return Workload(
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        prefix_tokens=args.shared_prefix_tokens,
        prefix_groups=args.prefix_groups,
        sampling=args.sampling,
        lines=read_lines(args.request_file) if args.request_file else (),
        words=args.words.read_text().split(),
        seed=args.seed,
    )


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="the server's gRPC address")
    parser.add_argument("--model", default="llm")
    _add_load(parser)
    _add_requests(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them, such as load.png (needs matplotlib)")
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--concurrency", type=_positive, nargs="+", default=[1, 8], metavar="N",
        help="closed loop: clients at a time, one level each (default: 1 8)",
    )  # fmt: skip
    kind.add_argument(
        "--rate", type=_positive_number, nargs="+", metavar="R", help="open loop: requests a second, one level each"
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--requests", type=_positive, metavar="N",
        help=f"at each level (default: {_REQUESTS_PER_CLIENT} for each client, {_REQUESTS_AT_A_RATE} at a rate)",
    )  # fmt: skip
    length.add_argument("--duration", type=_positive_number, metavar="S", help="or so many seconds at each level")
    group.add_argument("--warmup", type=int, default=1, metavar="N", help="requests before each level (default: 1)")
    group.add_argument(
        "--max-outstanding", type=_positive, default=1024, metavar="N",
        help="open loop: requests unanswered at most (default: 1024)",
    )  # fmt: skip
    group.add_argument("--timeout", type=_positive_number, default=600, metavar="S", help="of a request (default: 600)")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    for name in ("input", "output"):
        group.add_argument(
            f"--{name}-tokens", type=Lengths.parse, default=Lengths(128, 128), metavar="N",
            help="128, or 64:256 for a uniform choice (default: 128)",
        )  # fmt: skip
    group.add_argument(
        "--request-file", type=Path, metavar="FILE",
        help="JSON lines with text_input or prompt_tokens, max_tokens and other sampling fields; used in turn",
    )  # fmt: skip
    group.add_argument(
        "--shared-prefix-tokens", type=int, default=0, metavar="N", help="put before each prompt (default: 0)"
    )
    group.add_argument("--prefix-groups", type=_positive, default=1, metavar="G", help="prefixes in use (default: 1)")
    group.add_argument(
        "--sampling", type=_json_object, default={}, metavar="JSON",
        help='sampling_parameters of every request, besides {"temperature": 0, "ignore_eos": true}',
    )  # fmt: skip
    group.add_argument(
        "--words", type=Path, default=WORDS_FILE, metavar="FILE",
        help="prompts are made of these words, each of which should be one token (default: common English words)",
    )  # fmt: skip
    group.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def _positive_number(text: str) -> float:
    if not (value := float(text)) > 0:
        raise ValueError
    return value


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value
