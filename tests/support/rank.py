"""`python -m tests.support.rank`: stands in for a worker, and does what the variable RANKS orders.

RANKS is JSON: by `epoch.rank` the orders, one after another with `;` between them. After them it waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import time

from backend_lib.arena import Arena, StatusBlock, WorkerState
from backend_lib.worker.__main__ import parse_arguments
from backend_lib.worker.parent import die_with_parent


def main() -> None:
    args = parse_arguments()
    die_with_parent(args.parent)
    arena = Arena.attach(args.arena)
    assert arena.epoch(args.group) == args.epoch
    status = arena.status(args.group, args.rank)
    status.set_loading()
    for order in json.loads(os.environ["RANKS"])[f"{args.epoch}.{args.rank}"].split(";"):
        verb, _, value = order.partition(" ")
        if verb == "ready":
            status.set_ready(int(value))
        elif verb == "fail":
            status.set_failed(value)
        elif verb == "exit":
            os._exit(int(value))
        elif verb == "signal":
            os.kill(os.getpid(), signal.Signals[value])
        elif verb == "sleep":
            time.sleep(float(value))
        elif verb == "follow":
            _wait_failed(arena.status(args.group, int(value)))
        elif verb == "compute":
            _compute(float(value))
        else:
            raise ValueError(order)
    signal.pause()


def _wait_failed(status: StatusBlock) -> None:
    """Until that rank has said so. It may not have ended yet."""
    while status.state is not WorkerState.FAILED:
        time.sleep(0.001)


def _compute(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(1000))


if __name__ == "__main__":
    main()
