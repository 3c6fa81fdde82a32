"""Where a step's time goes on a CPU: the kinds of operation in the decoder's program, and the loop around it.

For so many rows that decode at a context of 192 tokens, and for a prompt of 256: milliseconds of the whole program, of
all operations of one kind by themselves (so they do not quite add up), and of the sampler. Then the infer loop with the
same rows, real arena and all, so that what a step costs outside the program is the difference.

    python -m benchmarks.step [--model smollm2] [--weights auto] [--threads N] [--rows 1 8 32]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import numpy as np
import torch

from backend_lib.arena import Arena, ArenaSpec, CommandKind, Doorbell
from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.cores import usable_cores
from backend_lib.models import load_decoder
from backend_lib.models.batch import ForwardBatch, chunk_words
from backend_lib.models.compiled import CompiledDecoder
from backend_lib.models.threads import share_threads, team
from backend_lib.worker.eager_sampling import best_tokens
from backend_lib.worker.engine import build_engine
from benchmarks.slots import request_bytes, write_request
from kernels.cpu import program

CONTEXT = 192
PROMPT = 256
KINDS = ("EMBED", "ROTATION", "NORM", "ADD_NORM", "LINEAR", "HEADS", "ATTEND", "QUANTISE", "ACTIVATE", "SOFT_CAP")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    share_threads(args.threads, quantised=True)
    settings = Settings(model=args.model, weights=args.weights, max_running=max(args.rows), threads=args.threads)
    profile_program(settings, args)
    for rows in args.rows:
        loop = RealLoop(settings, rows)
        loop.warm_up(args.repeats * 4)
        print(f"loop, {rows} rows: {loop.milliseconds(args.repeats * 4):.2f} ms a step")


def profile_program(settings: Settings, args: argparse.Namespace) -> None:
    decoder = load_decoder(open_checkpoint(settings.model), settings)
    if not isinstance(decoder, CompiledDecoder):
        raise SystemExit("this model is not computed as a program")
    rows = max(args.rows)
    kv = decoder.allocate_kv(max(rows * (CONTEXT + 1), PROMPT))
    table = torch.arange(rows * (CONTEXT + 1) + PROMPT, dtype=torch.int32)
    for count in args.rows:
        show(f"{count} rows", decoder, decode_batch(count, table), kv, args.repeats)
    show(f"prompt of {PROMPT}", decoder, prompt_batch(table), kv, args.repeats)


def decode_batch(rows: int, table: torch.Tensor) -> ForwardBatch:
    table = table[: rows * (CONTEXT + 1)].view(rows, CONTEXT + 1)
    return ForwardBatch(
        input_ids=torch.arange(rows), token_rows=torch.arange(rows), positions=torch.full((rows,), CONTEXT),
        kv_index=table[:, CONTEXT].long().contiguous(), kv_table=table, num_decodes=rows, prompt_logits_index=None,
        chunks=table[:0], rows=list(range(rows)), query_lens=[1] * rows, kv_lens=[CONTEXT + 1] * rows,
    )  # fmt: skip


def prompt_batch(table: torch.Tensor) -> ForwardBatch:
    table, ids = table[None, :PROMPT], torch.arange(PROMPT)
    return ForwardBatch(
        input_ids=ids, token_rows=torch.zeros_like(ids), positions=ids, kv_index=table[0].long(), kv_table=table,
        num_decodes=0, prompt_logits_index=torch.tensor([PROMPT - 1]),
        chunks=torch.from_numpy(chunk_words([0], [PROMPT], [PROMPT])), rows=[0], query_lens=[PROMPT], kv_lens=[PROMPT],
    )  # fmt: skip


def show(what: str, decoder: CompiledDecoder, batch: ForwardBatch, kv: torch.Tensor, repeats: int) -> None:
    logits = decoder.forward(batch, kv)
    operations, step = decoder.operations, decoder.step
    figures = {"whole": median_ms(lambda: team().run(operations, step), repeats)}
    for name in KINDS:
        chosen = np.ascontiguousarray(operations[operations[:, 0] == getattr(program, name)])
        if len(chosen):
            figures[name.lower()] = median_ms(lambda chosen=chosen: team().run(chosen, step), repeats)
    head = np.ascontiguousarray(operations[operations[:, 0] == program.LINEAR][-1:])
    figures["(head)"] = median_ms(lambda: team().run(head, step), repeats)
    figures["forward"] = median_ms(lambda: decoder.forward(batch, kv), repeats)
    figures["argmax"] = median_ms(lambda: best_tokens(logits), repeats)
    print(f"{what}: " + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()))


def median_ms(work, repeats: int) -> float:  # type: ignore[no-untyped-def]
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


class RealLoop:
    """Plays the router: `rows` greedy sequences that decode as long as they are asked to."""

    PROMPT = 16

    def __init__(self, settings: Settings, rows: int) -> None:
        self.rows = rows
        room = request_bytes(self.PROMPT, CONTEXT * 4)
        spec = ArenaSpec(
            num_groups=1, num_ranks=1, num_slots=rows, ring_records=4096, dirty_records=4096, heap_bytes=room * rows
        )
        self.arena = Arena.create(spec, {"settings": settings.as_dict(), "max_model_len": 4 * CONTEXT})
        self.loop = build_engine(self.arena, 0, 0, bells=[Doorbell()], replies=Doorbell()).loop
        for slot in range(rows):
            self._admit(slot, slot * room)

    def _admit(self, slot: int, at: int) -> None:
        write_request(self.arena.slots, slot, 1, at, range(slot, slot + self.PROMPT), CONTEXT * 3)
        self.arena.ring(0).post(CommandKind.ADMIT, slot, 1)

    def warm_up(self, steps: int) -> None:
        """To where `steps` steps have `CONTEXT` in their middle."""
        for _ in range(CONTEXT - self.PROMPT - steps // 2):
            self.loop.run_once()
            self.arena.dirty_list(0).drain()

    def milliseconds(self, steps: int, limit: float = 20.0) -> float:
        """Median of so many steps, or of those that fit into `limit` seconds."""
        dirty, times = self.arena.dirty_list(0), deque[float]()
        deadline = time.perf_counter() + limit
        while len(times) < steps and (not times or time.perf_counter() < deadline):
            started = time.perf_counter()
            self.loop.run_once()
            times.append(time.perf_counter() - started)
            dirty.drain()
        return statistics.median(times) * 1e3


if __name__ == "__main__":
    main()
