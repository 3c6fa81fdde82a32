"""`python -m tests.support.rank`: stands in for a worker, and does what the variable RANKS orders.

RANKS is JSON: by `epoch.rank` the orders, one after another with `;` between them. After them it waits to be killed.
`told` waits for a word of the test's, `follow RANK` until that rank has said that it failed, as it does before it ends.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

from backend_lib.arena import Arena, WorkerState
from backend_lib.request import FinishReason
from backend_lib.worker.__main__ import parse_arguments
from backend_lib.worker.parent import die_with_parent

TOLD = 7  # the slot whose verdict is the test's word


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
        elif verb == "told":
            _wait(lambda: arena.slots.client_finish(TOLD) is not FinishReason.NONE)
        elif verb == "follow":
            _wait(lambda rank=int(value): arena.status(args.group, rank).state is WorkerState.FAILED)
        elif verb == "compute":
            _compute(float(value))
        elif verb == "trickle":
            while True:  # that share of a core
                time.sleep(0.5)
                _compute(0.5 * float(value))
        else:
            raise ValueError(order)
    signal.pause()


def _wait(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


def _compute(seconds: float) -> None:
    deadline = time.thread_time() + seconds
    while time.thread_time() < deadline:
        sum(range(1000))


if __name__ == "__main__":
    main()
