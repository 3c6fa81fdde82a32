"""The command line of `benchmarks/peers.py`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.rivals.catalogue import PEERS, find_peer
from benchmarks.rivals.home import Home
from benchmarks.rivals.install import FAMILIES, InstallError, install
from benchmarks.rivals.peer import Peer, Setup

_DEFAULT = ["tandem", "llama.cpp-q4_0", "llama.cpp-q8_0", "onnxruntime-genai-int4", "openvino-genai"]


def main(arguments: Sequence[str] | None = None, description: str | None = None) -> int:
    """The exit code: 1 when something could not be installed, or nothing could be measured of an engine."""
    parser = _parser(description)
    args = parser.parse_args(arguments)
    home = Home(args.home.resolve())
    if args.install is None and args.run is None:
        parser.error("nothing to do: --install, --run or both")
    try:
        peers = [find_peer(name) for name in (_DEFAULT if args.run == [] else args.run or [])]
    except ValueError as error:
        parser.error(str(error))
    if args.run is not None and not importlib.util.find_spec("matplotlib"):
        parser.error("the picture needs matplotlib: pip install matplotlib")
    failed = _install(args.install, home) if args.install is not None else 0
    return max(failed, _compare(args, peers, home) if peers else 0)


def _install(names: list[str], home: Home) -> int:
    from backend_lib.checkpoint import open_checkpoint

    home.path.mkdir(parents=True, exist_ok=True)
    model, code = open_checkpoint("smollm2").path, 0
    for name in names or list(FAMILIES):
        started = time.monotonic()
        print(f"installing {name} …", flush=True)
        try:
            install(name, home, model)
            print(f"  in {time.monotonic() - started:.0f} s")
        except (InstallError, OSError) as error:
            print(f"  not installed: {error}")
            code = 1
    return code


def _compare(args: argparse.Namespace, peers: list[Peer], home: Home) -> int:
    from benchmarks.rivals.comparison import compare

    # Every engine, and whatever measures it, on the same cores.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    setup = Setup(
        home=home, model="smollm2", threads=args.threads, max_running=max(args.concurrency),
        sequence_tokens=args.prompt_tokens + args.output_tokens, long_tokens=args.long_tokens,
        settings=dict(each.partition("=")[::2] for each in args.set),
    )  # fmt: skip
    for path in (args.json, args.markdown, args.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    return compare(args, peers, setup)


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--install", nargs="*", choices=FAMILIES, metavar="FAMILY",
        help=f"make environments, all or some of {', '.join(FAMILIES)}; what is there already is left alone",
    )  # fmt: skip
    parser.add_argument(
        "--run", nargs="*", metavar="ENGINE",
        help=f"compare: tandem (also as tandem:weights=fp32), {', '.join(PEERS)} (default: {' '.join(_DEFAULT)})",
    )  # fmt: skip
    parser.add_argument(
        "--home", type=Path, default=Path("build/peers"), help="where engines are (default: build/peers)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of each Tandem")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core allowed")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds (default: 3)")
    parser.add_argument(
        "--retries", type=int, default=1, metavar="N", help="of rounds while the machine was slow (default: 1)"
    )
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="of an engine's round (default: 900)")
    _add_workload(parser)
    for name, suffix in (("json", "json"), ("markdown", "md"), ("plot", "png")):
        path = Path("build") / f"peers.{suffix}"
        parser.add_argument(f"--{name}", type=Path, default=path, metavar="FILE", help=f"default: {path}")
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="default: 1 8 32")
    for name, default, help in (
        ("prompt", 128, "of each prompt"), ("output", 128, "of each answer"),
        ("long", 1024, "of the prompt whose prefill alone is measured"),
    ):  # fmt: skip
        group.add_argument(f"--{name}-tokens", type=int, default=default, help=f"{help} (default: {default})")
    group.add_argument("--seed", type=int, default=0)
