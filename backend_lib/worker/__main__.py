"""`python -m backend_lib.worker`: one rank of a group. The router starts it and passes descriptors by number."""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import threading
import traceback

from backend_lib.arena import Arena, Doorbell, StatusBlock
from backend_lib.arena.names import worker_name
from backend_lib.arena.status import LOST_GROUP
from backend_lib.worker import crash_points
from backend_lib.worker.parent import die_with_parent


def main() -> None:
    args = parse_arguments()
    die_with_parent(args.parent)
    if args.server is not None:
        threading.Thread(target=_end_router_with_server, args=(args.server, args.parent), daemon=True).start()
    arena = Arena.attach(args.arena)
    name = worker_name(arena.spec, os.getpid(), args.group, args.rank)
    logging.basicConfig(level=logging.INFO, format=f"tandem {name}: %(message)s", stream=sys.stderr)
    status = arena.status(args.group, args.rank)
    if arena.epoch(args.group) != args.epoch:
        sys.exit(f"the group is at epoch {arena.epoch(args.group)}; this worker was started for {args.epoch}")
    status.set_loading()
    crash_points.arm(os.environ, args.epoch, args.rank)
    crash_points.reach("loading")
    try:
        _serve(arena, status, args)
    except Exception as error:
        is_lost = type(error).__name__ == "LostGroup"  # its module imports torch, which may be what has failed
        if not is_lost:
            traceback.print_exc()
        status.set_failed(f"{type(error).__name__}: {error}")
        Doorbell(args.replies).ring()
        sys.stderr.flush()
        os._exit(LOST_GROUP if is_lost else 1)  # threads of collectives may be waiting, and would be no clean end


def _serve(arena: Arena, status: StatusBlock, args: argparse.Namespace) -> None:
    """Load the model, say so, and compute until killed. torch is first imported here."""
    if args.cores:
        os.sched_setaffinity(0, args.cores)  # before torch counts the cores and starts threads
    from backend_lib.worker.engine import build_engine

    bells, replies = [Doorbell(fd) for fd in args.bells], Doorbell(args.replies)
    engine = build_engine(arena, args.group, args.rank, bells=bells, replies=replies)
    crash_points.reach("loaded")
    status.set_ready(engine.kv_tokens, engine.predicted_step)
    crash_points.reach("ready")
    replies.ring()
    engine.loop.run_forever()


def _end_router_with_server(server: int, router: int) -> None:
    """The router ends itself when tritonserver is dead, unless a thread of it waits inside Triton's code for the dead
    server and keeps Python's lock: then no other thread of it runs any more."""
    poll = select.poll()
    poll.register(server, select.POLLIN)
    poll.poll()
    if os.getppid() == router:
        os.kill(router, signal.SIGKILL)


def parse_arguments() -> argparse.Namespace:
    """Of a worker, which the router writes."""
    parser = argparse.ArgumentParser(prog="backend_lib.worker", description=__doc__)
    for name, text in {
        "arena": "descriptor of the arena",
        "replies": "descriptor of the doorbell that this worker rings",
        "group": "which copy of the weights",
        "rank": "place in the group",
        "epoch": "of the group when this worker was started",
        "parent": "process id of the router",
    }.items():
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument(
        "--bells", type=lambda text: [int(fd) for fd in text.split(",")], required=True,
        help="descriptors of the doorbells at which the ranks wait; the router rings that of rank 0",
    )  # fmt: skip
    parser.add_argument(
        "--cores", type=lambda text: [int(core) for core in text.split(",")], help="that this worker may run on"
    )
    parser.add_argument("--server", type=int, help="pidfd of tritonserver")
    return parser.parse_args()


if __name__ == "__main__":
    main()
