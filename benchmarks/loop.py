"""CPU time of the infer loop per step, with a model that computes nothing.

32 rows decode; each step one sequence ends and one is admitted. KV allocation, row staging, publishing and the
doorbell are the real ones, as are arena, scheduler and runner. The figure is the loop thread's own CPU time
(`thread_time`), so that a busy machine hardly changes it. With overlap the forward runs on the compute thread and is
not in it.

    python -m benchmarks.loop [--rows 32] [--steps 3000] [--overlap on|off]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path

from backend_lib.arena import Arena, ArenaSpec, CommandKind, Doorbell
from backend_lib.config import Settings
from backend_lib.worker.engine import build_engine

PROMPT_LEN = 16
SLOT_BYTES = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--overlap", choices=("on", "off"), default="on")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = LoopBench(Path(folder), args.rows, args.overlap)
        cpu_ms = bench.run(args.steps)
    cpu_ms = sorted(cpu_ms[len(cpu_ms) // 10 :])  # the first tenth warms up
    share = cpu_ms[int(len(cpu_ms) * 0.99)]
    print(f"overlap {args.overlap}, {args.rows} rows, one admitted and one finished a step, {len(cpu_ms)} steps")
    print(f"loop CPU time per step: median {statistics.median(cpu_ms):.3f} ms, p99 {share:.3f} ms")


class LoopBench:
    """Plays the router in the loop's own thread, outside the timed part."""

    def __init__(self, folder: Path, rows: int, overlap: str) -> None:
        # A sequence lives as many steps as there are rows, so that one ends in each.
        _write_hash_checkpoint(folder)
        self._rows, self._num_slots = rows, 4 * rows
        settings = Settings(
            model=str(folder), max_running=rows, max_model_len=PROMPT_LEN + rows, overlap=overlap, kv_tokens=1 << 16
        )
        spec = ArenaSpec(
            num_groups=1, num_ranks=1, num_slots=self._num_slots, ring_records=1024, dirty_records=4096,
            heap_bytes=SLOT_BYTES * self._num_slots,
        )  # fmt: skip
        config = {"settings": settings.as_dict(), "max_model_len": PROMPT_LEN + rows}
        self._arena = Arena.create(spec, config)
        self._ring, self._dirty = self._arena.ring(0), self._arena.dirty_list(0)
        self._loop, _ = build_engine(self._arena, 0, 0, commands=Doorbell(), replies=Doorbell())
        self._free = deque(range(self._num_slots))
        self._generation = 0

    def run(self, steps: int) -> list[float]:
        cpu_ms = []
        for _ in range(steps):
            self._admit()
            started = time.thread_time()
            self._loop.run_once()
            cpu_ms.append((time.thread_time() - started) * 1e3)
            self._recycle()
        return cpu_ms

    def _admit(self) -> None:
        slot, self._generation = self._free.popleft(), self._generation + 1
        blob = json.dumps({"stop_token_ids": []}).encode()
        at = slot * SLOT_BYTES
        fields = {
            "generation": self._generation, "params_offset": at, "params_bytes": len(blob), "prompt_offset": at + 64,
            "prompt_len": PROMPT_LEN, "output_offset": at + 64 + 4 * PROMPT_LEN, "max_tokens": self._rows,
            "ignore_eos": 1, "top_p": 1.0,
        }  # fmt: skip
        self._arena.slots.write(slot, fields)
        self._arena.slots.write_params(slot, blob)
        self._arena.slots.prompt_ids(slot)[:] = range(PROMPT_LEN)
        self._ring.post(CommandKind.ADMIT, slot, self._generation)

    def _recycle(self) -> None:
        for ref in self._dirty.drain() or ():
            published = self._arena.slots.published(ref.slot, ref.generation)
            if published and published.released:
                self._free.append(ref.slot)


def _write_hash_checkpoint(folder: Path) -> None:
    """The model whose next token is a hash of its prefix."""
    from tests.support.checkpoints import make_hash_checkpoint

    make_hash_checkpoint(folder, vocab_size=512, eos_token_id=0, max_position=4096)


if __name__ == "__main__":
    main()
