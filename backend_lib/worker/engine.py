"""Puts a rank together: what computes, the scheduler, the loop."""

from __future__ import annotations

import gc
from functools import partial
from typing import NamedTuple

from backend_lib.arena import Arena, Doorbell
from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.worker.agreement import SoloAgreement
from backend_lib.worker.grammar import GrammarCompiler
from backend_lib.worker.loop import InferLoop
from backend_lib.worker.machine import build_machine
from backend_lib.worker.preparation import Preparation
from backend_lib.worker.publisher import Publisher
from backend_lib.worker.scheduler import Scheduler
from backend_lib.worker.sequence import Sequence


class Engine(NamedTuple):
    """A loop that is ready to run. `predicted_step`: seconds that a step with a full token budget may take."""

    loop: InferLoop
    kv_tokens: int
    predicted_step: float


def build_engine(arena: Arena, group: int, rank: int, *, bells: list[Doorbell], replies: Doorbell) -> Engine:
    """Load and warm the model of `arena.config`.

    Raises:
        ValueError: the checkpoint or a setting cannot be served, in words for Triton's log.
    """
    config = arena.config
    settings = Settings(**config["settings"])
    checkpoint = open_checkpoint(settings.model)
    # A worker that takes another's place holds as much: the router has admitted requests by it.
    machine = build_machine(
        checkpoint,
        settings,
        config["max_model_len"],
        kv_tokens=arena.status(group, rank).kv_tokens or settings.kv_tokens,
    )
    scheduler = Scheduler(
        kv_tokens=machine.kv_tokens, max_running=settings.max_running, max_model_len=config["max_model_len"],
        prefill_chunk=settings.prefill_chunk, conservative=settings.admission == "conservative",
    )  # fmt: skip
    gc.freeze()  # weights and code stay; a collection need not look at them again
    preparation = Preparation(GrammarCompiler(checkpoint, on_done=bells[0].ring))
    loop = InferLoop(
        SoloAgreement(arena.ring(group), bells[rank], rank, prepared=preparation.done),
        scheduler,
        machine.runner,
        Publisher(arena.slots, arena.dirty_list(group), replies),
        arena.status(group, rank),
        preparation=preparation,
        read_slot=partial(Sequence.from_slot, arena.slots, eos_token_ids=frozenset(checkpoint.eos_token_ids)),
        overlap=machine.overlap,
    )
    return Engine(loop, machine.kv_tokens, machine.seconds_per_token * settings.prefill_chunk)
