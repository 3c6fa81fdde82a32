"""CPU time of the infer loop per step, with a model that computes nothing.

32 rows decode; each step one sequence ends and one is admitted. KV allocation, row staging, publishing and the
doorbell are the real ones, as are arena, scheduler and runner. The figure is the loop thread's own CPU time
(`thread_time`), so that a busy machine hardly changes it. With overlap the forward runs on the compute thread and is
not in it.

With `--blocked N` the rows decode from the first step to the last; N sequences that do not fit wait behind them, each
step one of these is aborted and another comes, and the prefix cache is full of small nodes that the decodes evict.

    python -m benchmarks.loop [--rows 32] [--steps 3000] [--overlap on|off] [--blocked N]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from backend_lib.arena import Arena, ArenaSpec, CommandKind, Doorbell
from backend_lib.config import Settings
from backend_lib.worker.engine import build_engine
from benchmarks.slots import request_bytes, write_request

PROMPT_LEN = 16
SMALL_NODE = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--overlap", choices=("on", "off"), default="on")
    parser.add_argument("--blocked", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kind = BlockedBench if args.blocked else LoopBench
        bench = kind(Path(folder), args)
        cpu_ms = bench.run(args.steps)
    cpu_ms = sorted(cpu_ms[len(cpu_ms) // 10 :])  # the first tenth warms up
    share = cpu_ms[int(len(cpu_ms) * 0.99)]
    print(f"overlap {args.overlap}, {args.rows} rows, {bench.what}, {len(cpu_ms)} steps")
    print(f"loop CPU time per step: median {statistics.median(cpu_ms):.3f} ms, p99 {share:.3f} ms")


class LoopBench:
    """Plays the router in the loop's own thread, outside the timed part."""

    what = "one admitted and one finished a step"

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        # A sequence lives as many steps as there are rows, so that one ends in each.
        rows = args.rows
        self._build(folder, args, max_running=rows, num_slots=4 * rows, max_tokens=rows, kv_tokens=1 << 16)

    def _build(
        self, folder: Path, args: argparse.Namespace, *, max_running: int, num_slots: int, max_tokens: int,
        kv_tokens: int,
    ) -> None:  # fmt: skip
        _write_hash_checkpoint(folder)
        self._max_tokens = max_tokens
        self._slot_bytes = request_bytes(PROMPT_LEN, max_tokens)
        max_model_len = PROMPT_LEN + max_tokens
        settings = Settings(
            model=str(folder), max_running=max_running, max_model_len=max_model_len, overlap=args.overlap,
            kv_tokens=kv_tokens,
        )  # fmt: skip
        spec = ArenaSpec(
            num_groups=1, num_ranks=1, num_slots=num_slots, ring_records=4096, dirty_records=4096,
            heap_bytes=self._slot_bytes * num_slots,
        )  # fmt: skip
        self._arena = Arena.create(spec, {"settings": settings.as_dict(), "max_model_len": max_model_len})
        self._ring, self._dirty = self._arena.ring(0), self._arena.dirty_list(0)
        self._loop = build_engine(self._arena, 0, 0, bells=[Doorbell()], replies=Doorbell()).loop
        self._free = deque(range(num_slots))
        self._generation = 0

    def run(self, steps: int) -> list[float]:
        cpu_ms = []
        for _ in range(steps):
            self._post()
            started = time.thread_time()
            self._loop.run_once()
            cpu_ms.append((time.thread_time() - started) * 1e3)
            self._recycle()
        return cpu_ms

    def _post(self) -> None:
        self._admit(range(PROMPT_LEN))

    def _admit(self, prompt: Sequence[int]) -> tuple[int, int]:
        slot, self._generation = self._free.popleft(), self._generation + 1
        at = slot * self._slot_bytes
        write_request(self._arena.slots, slot, self._generation, at, prompt, self._max_tokens)
        self._ring.post(CommandKind.ADMIT, slot, self._generation)
        return slot, self._generation

    def _recycle(self) -> None:
        for ref in self._dirty.drain() or ():
            published = self._arena.slots.published(ref.slot, ref.generation)
            if published and published.released:
                self._free.append(ref.slot)


class BlockedBench(LoopBench):
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.what = f"{args.blocked} blocked, one of them aborted and one admitted a step"
        max_tokens = args.steps + SMALL_NODE
        # All that the rows may come to use, so that nothing else fits, though there is a row for it.
        self._build(
            folder, args, max_running=args.rows + 1, num_slots=args.rows + args.blocked + 8, max_tokens=max_tokens,
            kv_tokens=args.rows * (PROMPT_LEN + max_tokens),
        )  # fmt: skip
        self._rng = random.Random(0)
        self._fill_cache()
        for _ in range(args.rows):
            self._admit(self._prompt())
        self._blocked = deque(self._admit(self._prompt()) for _ in range(args.blocked))

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(512) for _ in range(PROMPT_LEN)]

    def _fill_cache(self) -> None:
        """Nodes of a few tokens and fewer, wide below the root."""
        memory = self._loop._scheduler.memory
        for _ in range(memory.num_tokens // SMALL_NODE):
            indices = memory.allocate(np.zeros(SMALL_NODE, dtype=int), np.arange(SMALL_NODE))
            ids = np.array(self._prompt()[:SMALL_NODE], dtype=np.int32)
            _, spare = memory.cache.insert(ids, indices.astype(np.int32), adapter=0, now=0)
            memory.kv.give_back(spare)

    def _post(self) -> None:
        self._ring.post(CommandKind.ABORT, *self._blocked.popleft())
        self._blocked.append(self._admit(self._prompt()))


def _write_hash_checkpoint(folder: Path) -> None:
    """The model whose next token is a hash of its prefix."""
    from tests.support.checkpoints import make_hash_checkpoint

    make_hash_checkpoint(folder, vocab_size=512, eos_token_id=0, max_position=4096)


if __name__ == "__main__":
    main()
