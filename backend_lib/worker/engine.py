"""Puts a rank together: decoder, memory, scheduler, runner, loop."""

from __future__ import annotations

import gc
import logging
import sys
import time
from functools import partial
from typing import NamedTuple

import torch

from backend_lib.arena import Arena, Doorbell
from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import load_decoder
from backend_lib.models.batch import Decoder
from backend_lib.models.linear import QUANTISED
from backend_lib.models.load import weight_format
from backend_lib.models.threads import share_threads
from backend_lib.worker.agreement import SoloAgreement
from backend_lib.worker.cores import usable_cores
from backend_lib.worker.grammar import GrammarCompiler
from backend_lib.worker.loop import InferLoop
from backend_lib.worker.memory import available_bytes
from backend_lib.worker.preparation import Preparation
from backend_lib.worker.publisher import Publisher
from backend_lib.worker.runner import InlineStream, Runner, compute_thread
from backend_lib.worker.scheduler import Scheduler
from backend_lib.worker.sequence import Sequence

log = logging.getLogger("tandem")

# A compute thread and the loop's thread share one interpreter; the default of 5 ms would let either stall the other.
SWITCH_INTERVAL = 50e-6
WARM_UP_TOKENS = 16
USUAL_TOKENS = 384  # prompt and output of a sequence; more is paid for by pausing others, less leaves a prefix cache


class Engine(NamedTuple):
    """A loop that is ready to run. `predicted_step`: seconds that a step with a full token budget may take."""

    loop: InferLoop
    kv_tokens: int
    predicted_step: float


def build_engine(arena: Arena, group: int, rank: int, *, commands: Doorbell, replies: Doorbell) -> Engine:
    """Load and warm the model of `arena.config`.

    Raises:
        ValueError: the checkpoint or a setting cannot be served, in words for Triton's log.
    """
    config = arena.config
    settings = Settings(**config["settings"])
    _share_threads(settings)
    started = time.monotonic()
    checkpoint = open_checkpoint(settings.model)
    decoder = load_decoder(checkpoint, settings)
    # A worker that takes another's place holds as much: the router has admitted requests by it.
    kv_tokens = arena.status(group, rank).kv_tokens or _kv_tokens(settings, decoder, config["max_model_len"])
    log.info("loaded %s in %.1f s; KV cache of %d tokens", settings.model, time.monotonic() - started, kv_tokens)
    overlap = _overlap(settings)
    runner = Runner(
        decoder, kv_tokens=kv_tokens, max_running=settings.max_running, max_model_len=config["max_model_len"],
        device=torch.device("cpu"), stream=compute_thread() if overlap else InlineStream(),
    )  # fmt: skip
    seconds_per_token = runner.warm_up(min(WARM_UP_TOKENS, config["max_model_len"]))
    scheduler = Scheduler(
        kv_tokens=kv_tokens, max_running=settings.max_running, max_model_len=config["max_model_len"],
        prefill_chunk=settings.prefill_chunk, conservative=settings.admission == "conservative",
    )  # fmt: skip
    gc.freeze()  # weights and code stay; a collection need not look at them again
    preparation = Preparation(GrammarCompiler(checkpoint, on_done=commands.ring))
    loop = InferLoop(
        SoloAgreement(arena.ring(group), commands, rank, prepared=preparation.done),
        scheduler,
        runner,
        Publisher(arena.slots, arena.dirty_list(group), replies),
        arena.status(group, rank),
        preparation=preparation,
        read_slot=partial(Sequence.from_slot, arena.slots, eos_token_ids=frozenset(checkpoint.eos_token_ids)),
        overlap=overlap,
    )
    return Engine(loop, kv_tokens, seconds_per_token * settings.prefill_chunk)


def _share_threads(settings: Settings) -> None:
    """A team of threads takes all cores, since it can give way to Triton and the router. torch gets one less."""
    quantised = weight_format(settings) in QUANTISED
    cores = usable_cores()
    share_threads(settings.threads or (cores if quantised else max(1, cores - 1)), quantised=quantised)


def _overlap(settings: Settings) -> bool:
    """On a CPU `auto` is off: see benchmarks/loop.py."""
    if settings.overlap != "on":
        return False
    sys.setswitchinterval(SWITCH_INTERVAL)
    return True


def _kv_tokens(settings: Settings, decoder: Decoder, max_model_len: int) -> int:
    """What was asked for; else room for the usual length of all that run, or one whole context, as memory allows."""
    if settings.kv_tokens is not None:
        return settings.kv_tokens
    room = int(available_bytes() * settings.memory_fraction) // decoder.kv_bytes_per_token
    if room < 2:
        raise ValueError(f"memory_fraction {settings.memory_fraction} of what is free leaves no room for a KV cache")
    return min(max(settings.max_running * USUAL_TOKENS, max_model_len), room)
