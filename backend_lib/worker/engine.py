"""Puts a rank together: what computes, the scheduler, the loop."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any, NamedTuple

from backend_lib.arena import Arena, Doorbell
from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.worker.agreement import Agreement, FollowingAgreement, LeadingAgreement, Outlook, SoloAgreement
from backend_lib.worker.broadcast import BroadcastFollower, BroadcastLeader
from backend_lib.worker.following import SilentPublisher
from backend_lib.worker.grammar import GrammarCompiler
from backend_lib.worker.loop import InferLoop
from backend_lib.worker.machine import build_machine
from backend_lib.worker.preparation import Preparation
from backend_lib.worker.process_groups import RankGroup, join
from backend_lib.worker.publisher import Publisher
from backend_lib.worker.scheduler import Scheduler
from backend_lib.worker.sequence import Sequence
from backend_lib.worker.state_check import StateCheck


class Engine(NamedTuple):
    """A loop that is ready to run. `predicted_step`: seconds that a step with a full token budget may take."""

    loop: InferLoop
    kv_tokens: int
    predicted_step: float


def build_engine(arena: Arena, group: int, rank: int, *, bells: list[Doorbell], replies: Doorbell) -> Engine:
    """Load and warm the model of `arena.config`. `bells`: at which each rank of the group waits.

    Raises:
        ValueError: the checkpoint or a setting cannot be served, in words for Triton's log.
        LostGroup: another rank of the group has ended.
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
        join=partial(join, arena.status(group, 0), bells, rank, settings.tensor_parallel),
    )
    scheduler = Scheduler(
        kv_tokens=machine.kv_tokens, max_running=settings.max_running, max_model_len=config["max_model_len"],
        prefill_chunk=settings.prefill_chunk, conservative=settings.admission == "conservative",
    )  # fmt: skip
    gc.freeze()  # weights and code stay; a collection need not look at them again
    publisher: Any = Publisher(arena.slots, arena.dirty_list(group), replies) if rank == 0 else SilentPublisher()
    compiler = GrammarCompiler(checkpoint, on_done=bells[0].ring) if rank == 0 else None
    preparation = Preparation(compiler, on_begun=publisher.begun)
    is_checked = settings.debug == "on" and settings.tensor_parallel > 1
    loop = InferLoop(
        _agreement(arena, group, machine.ranks, bells, preparation, settings),
        scheduler,
        machine.runner,
        publisher,
        arena.status(group, rank),
        preparation=preparation,
        read_slot=partial(
            Sequence.from_slot, arena.slots, eos_token_ids=frozenset(checkpoint.eos_token_ids), keeps_slot=rank == 0
        ),
        overlap=machine.overlap,
        check=StateCheck(arena.digests(group), rank).check if is_checked else None,
    )
    return Engine(loop, machine.kv_tokens, machine.seconds_per_token * settings.prefill_chunk)


def _agreement(
    arena: Arena, group: int, ranks: Any, bells: list[Doorbell], preparation: Preparation, settings: Settings
) -> Agreement:
    ring, decisions, rank = arena.ring(group), arena.decisions(group), ranks.rank
    by_broadcast = settings.agreement == "broadcast"
    if rank:
        following = FollowingAgreement(ring, bells, decisions, rank)
        return BroadcastFollower(following, ranks) if by_broadcast else following
    outlook = Outlook(ring, preparation.done)
    if not isinstance(ranks, RankGroup):
        return SoloAgreement(outlook, bells[0])
    leading = LeadingAgreement(outlook, bells, decisions, patience=2 * settings.hang_seconds)
    return BroadcastLeader(leading, ranks) if by_broadcast else leading
