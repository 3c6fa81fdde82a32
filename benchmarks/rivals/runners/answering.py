"""What the runners share: arguments, and waves asked for and answered as lines of JSON.

A runner is a file that is started in another engine's environment; nothing of this project is there but this folder.
It says `{"ready": versions}` once and then, for each `{"prompts": [[ids]], "tokens": n}`, when each row's tokens came,
in seconds since the wave was read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

Emit = Callable[[int], None]  # called with a row's number when that row has one more token
Generate = Callable[[list[list[int]], int, Emit], None]


def parse_arguments(**extra: str) -> argparse.Namespace:
    """`extra`: further options and their defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    for name, default in extra.items():
        parser.add_argument(f"--{name}", default=default)
    return parser.parse_args()


def keep_stdout() -> int:
    """A descriptor for the answers; what libraries print goes to stderr."""
    own = os.dup(1)
    os.dup2(2, 1)
    return own


def answer(generate: Generate, descriptor: int, packages: list[str]) -> None:
    """Until stdin ends."""
    with os.fdopen(descriptor, "w") as out:
        _say(out, {"ready": {name: version(name) for name in packages}})
        for line in sys.stdin:
            _say(out, _wave(generate, **json.loads(line)))


def _wave(generate: Generate, prompts: list[list[int]], tokens: int) -> dict:
    times: list[list[float]] = [[] for _ in prompts]
    started = time.perf_counter()
    generate(prompts, tokens, lambda row: times[row].append(time.perf_counter() - started))
    return {"times": times}


def _say(out, value: dict) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()
