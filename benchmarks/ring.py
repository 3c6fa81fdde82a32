"""What the arena costs: a command's way to a worker and the answer's way back, and how many commands a second.

    python benchmarks/ring.py

Two processes. The first posts a command and rings; the second wakes, reads it, publishes the slot, appends it to the
dirty list and rings back; a second thread of the first process, like the router's reply thread, wakes and drains it.
Between two commands the first process sleeps, so that both sides are asleep when the next one comes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from backend_lib.arena import Arena, ArenaSpec, CommandKind, Doorbell, SlotRef
from backend_lib.request import FinishReason

BATCH = 64  # commands a ring of the bell, when they are streamed


class Times(NamedTuple):
    """Nanoseconds of `time.monotonic_ns()`, which all processes share."""

    posted: np.ndarray
    seen: np.ndarray
    answered: np.ndarray


def worker(arena_fd: int, bell_fd: int, reply_fd: int, last: int, last_answered: int) -> None:
    """Read commands up to `last`. Up to `last_answered` each is answered, with the time it was seen in its slot."""
    arena, bell, reply = Arena.attach(arena_fd), Doorbell(bell_fd), Doorbell(reply_fd)
    ring, dirty = arena.ring(0), arena.dirty_list(0)
    reply.ring()
    while (seen := ring.cursor(0)) < last:
        bell.wait()
        for command in ring.read(0):
            seen = command.sequence
            if seen <= last_answered:
                arena.slots.headers["first_scheduled_ns"][command.slot] = time.monotonic_ns()
                arena.slots.publish(command.slot, command.generation, 1, FinishReason.NONE, released=False)
                dirty.append([SlotRef(command.slot, command.generation)])
                reply.ring()
        ring.advance(0, seen)
    reply.ring()


class ReplyThread(threading.Thread):
    """Notes when each answer is seen, and lets the main thread go on."""

    def __init__(self, arena: Arena, reply: Doorbell, times: Times) -> None:
        super().__init__(daemon=True)
        self.arena, self.reply, self.times = arena, reply, times
        self.answered = threading.Semaphore(0)

    def run(self) -> None:
        dirty, remaining = self.arena.dirty_list(0), len(self.times.answered)
        while remaining:
            self.reply.wait()
            for ref in dirty.drain() or ():
                assert self.arena.slots.published(ref.slot, ref.generation) is not None
                self.times.answered[ref.generation] = time.monotonic_ns()
                self.times.seen[ref.generation] = self.arena.slots.headers["first_scheduled_ns"][ref.slot]
                remaining -= 1
                self.answered.release()


def round_trips(arena: Arena, bell: Doorbell, reply: Doorbell, count: int, pause: float) -> Times:
    times = Times(*(np.zeros(count, dtype=np.int64) for _ in Times._fields))
    replies, ring = ReplyThread(arena, reply, times), arena.ring(0)
    replies.start()
    for place in range(count):
        time.sleep(pause)
        times.posted[place] = time.monotonic_ns()
        ring.post(CommandKind.ADMIT, place % arena.spec.num_slots, place)
        bell.ring()
        replies.answered.acquire()
    replies.join()
    return times


def streamed_per_second(arena: Arena, bell: Doorbell, reply: Doorbell, count: int) -> float:
    ring, start = arena.ring(0), time.perf_counter()
    for place in range(1, count + 1):
        ring.post(CommandKind.ADMIT, 0, place)
        if place % BATCH == 0 or place == count:
            bell.ring()
    reply.wait()
    return count / (time.perf_counter() - start)


def measure(count: int, streamed: int, pause: float) -> tuple[Times, float]:
    spec = ArenaSpec(num_groups=1, num_ranks=1, num_slots=64, ring_records=1024, dirty_records=4096, heap_bytes=0)
    arena, bell, reply = Arena.create(spec, {}), Doorbell(), Doorbell()
    fds = (arena.fd, bell.fd, reply.fd)
    numbers = (*fds, count + streamed, count)
    process = subprocess.Popen([sys.executable, __file__, "--worker", *map(str, numbers)], pass_fds=fds)
    assert reply.wait(10), "the worker did not start"
    times = round_trips(arena, bell, reply, count, pause)
    rate = streamed_per_second(arena, bell, reply, streamed)
    process.wait()
    return times, rate


def show(times: Times, rate: float, streamed: int) -> None:
    rows = {
        "posted -> worker has read it": times.seen - times.posted,
        "worker -> reply thread has read it": times.answered - times.seen,
        "posted -> reply thread has read it": times.answered - times.posted,
    }
    print(f"{len(times.posted)} commands, one at a time, both sides asleep{'':<6}p50 us   p99 us")
    for name, took in rows.items():
        p50, p99 = np.percentile(took, [50, 99]) / 1000
        print(f"  {name:<48}{p50:>10.1f}{p99:>9.1f}")
    print(f"{streamed} commands streamed, {BATCH} a ring: {rate:,.0f} a second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--round-trips", type=int, default=5_000)
    parser.add_argument("--streamed", type=int, default=500_000)
    parser.add_argument("--pause", type=float, default=0.0005, help="seconds between two commands")
    parser.add_argument("--worker", type=int, nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
    else:
        show(*measure(args.round_trips, args.streamed, args.pause), args.streamed)


if __name__ == "__main__":
    main()
