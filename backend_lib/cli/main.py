"""The command line: `tandem serve` and `tandem doctor`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from backend_lib.cli.doctor import doctor
from backend_lib.cli.options import Options
from backend_lib.cli.serve import serve

_COMMANDS = {"serve": serve, "doctor": doctor}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit code 2 means that it was asked for something that can't be done as asked."""
    own, flags = _split(list(sys.argv[1:] if arguments is None else arguments))
    parsed = _parser().parse_args(own)
    options = Options(
        model=parsed.model,
        assignments=parsed.set,
        name=parsed.name,
        tritonserver=parsed.tritonserver,
        model_repository=parsed.model_repository,
        flags=tuple(flags),
    )
    try:
        return _COMMANDS[parsed.command](options)
    except (ValueError, FileNotFoundError) as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before there was a server, perhaps while a model was fetched from the hub
        return 128 + signal.SIGINT


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Tandem's own arguments, and tritonserver's, which follow `--`."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem", description="Large language models from a Triton Inference Server.")
    commands = parser.add_subparsers(dest="command", required=True)
    flags = "What follows -- goes to tritonserver, such as -- --http-port=9000 --log-info=1."
    _add_options(commands.add_parser("serve", help="start a server on a model", epilog=flags))
    _add_options(commands.add_parser("doctor", help="say what is here and what is missing", epilog=flags))
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="smollm2 (built in), a Hugging Face folder, a hub id, or a GGUF file")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the model; may be repeated")
    add("--name", help="the name it is served under (default: llm)")
    add("--tritonserver", type=Path, metavar="PATH", help="the server to start, when it is not the one found first")
    add("--model-repository", type=Path, metavar="PATH", help="serve this repository; --name says which model is meant")


if __name__ == "__main__":
    sys.exit(main())
