"""Puts together what computes: a decoder, its memory, and a runner, on a CPU or a GPU."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from backend_lib.checkpoint import Checkpoint
from backend_lib.config import Settings
from backend_lib.cores import usable_cores
from backend_lib.models import load_decoder
from backend_lib.models.batch import Decoder
from backend_lib.models.graphed import GraphedDecoder
from backend_lib.models.linear import QUANTISED
from backend_lib.models.placement import Placement, place
from backend_lib.models.threads import share_threads
from backend_lib.worker.device import CpuDevice, Device
from backend_lib.worker.eager_sampling import EagerSampling
from backend_lib.worker.inputs import FreshInputs
from backend_lib.worker.memory import available_bytes
from backend_lib.worker.process_groups import SOLO, RankGroup, Solo
from backend_lib.worker.runner import InlineStream, Runner, compute_thread
from backend_lib.worker.waits import cpu_guard, cuda_guard, no_guard
from backend_lib.worker.warm_up import warm_up

log = logging.getLogger("tandem")

# A compute thread and the loop's thread share one interpreter; the default of 5 ms would let either stall the other.
SWITCH_INTERVAL = 50e-6
WARM_UP_TOKENS = 16
USUAL_TOKENS = 384  # prompt and output of a sequence; more is paid for by pausing others, less leaves a prefix cache
MAX_KV_TOKENS = (1 << 31) - 2  # indices are 32 bits, and one is the spare's


class Machine(NamedTuple):
    """`overlap`: whether a step is launched before the one before it is known. `seconds_per_token`: of a prompt.
    `ranks`: those that compute together."""

    runner: Runner
    kv_tokens: int
    overlap: bool
    seconds_per_token: float
    ranks: RankGroup | Solo


def build_machine(
    checkpoint: Checkpoint, settings: Settings, max_model_len: int, *, kv_tokens: int | None,
    join: Callable[[torch.device], RankGroup | Solo] = lambda device: SOLO,
) -> Machine:  # fmt: skip
    """Load the model, take memory for `kv_tokens` or as many as fit on every rank, and warm it up.

    `join`: meets the other ranks of the group, with the device that they compute on.

    Raises ValueError when the checkpoint or a setting cannot be served.
    """
    started = time.monotonic()
    placement = place(settings, checkpoint)
    ranks = join(placement.device)
    if placement.device.type == "cpu":
        _share_threads(settings, placement)
    device = _device(placement, settings)
    decoder = load_decoder(checkpoint, settings, placement, ranks)
    parts = _Parts(placement, decoder, device, settings, max_model_len, _overlap(placement, settings), ranks)
    kv_tokens = ranks.minimum(kv_tokens or parts.kv_tokens())
    log.info("loaded %s in %.1f s; KV cache of %d tokens", settings.model, time.monotonic() - started, kv_tokens)
    runner = parts.runner(kv_tokens)
    runner.capture(settings.max_running)
    seconds_per_token = warm_up(runner, parts.warm_up_lengths(), everything=placement.by_kernels)
    return Machine(runner, kv_tokens, parts.overlap, seconds_per_token, ranks)


class _Parts(NamedTuple):
    placement: Placement
    decoder: Decoder
    device: Device
    settings: Settings
    max_model_len: int
    overlap: bool
    ranks: RankGroup | Solo

    def runner(self, kv_tokens: int) -> Runner:
        in_thread = self.overlap and not self.placement.by_kernels  # kernels are launched, and run elsewhere
        return Runner(
            self.decoder, kv_tokens=kv_tokens, max_running=self.settings.max_running, max_model_len=self.max_model_len,
            device=self.device, stream=compute_thread() if in_thread else InlineStream(), ranks=self.ranks,
            **self._operations(),
        )  # fmt: skip

    def _operations(self) -> dict:
        if not isinstance(self.decoder, GraphedDecoder):
            return {"operations": EagerSampling(), "inputs": FreshInputs()}
        from backend_lib.worker.kernel_inputs import StaticInputs
        from backend_lib.worker.kernel_sampling import KernelSampling

        where = self.device.torch_device
        rows, vocab_size = self.settings.max_running, self.decoder.vocab_size
        operations = KernelSampling(max_rows=rows, vocab_size=vocab_size, device=where)
        return {"operations": operations, "inputs": StaticInputs(self.decoder)}

    def warm_up_lengths(self) -> list[int]:
        """On a GPU a prompt's length selects kernels, of which each serves at least lengths that differ by a factor of
        two."""
        longest = min(self.settings.prefill_chunk, self.max_model_len - 1)
        usual = min(WARM_UP_TOKENS, longest)
        if self.placement.device.type != "cuda":
            return [usual, usual]
        return [*(1 << power for power in range(longest.bit_length())), longest, longest]

    def kv_tokens(self) -> int:
        """Room for the usual length of all that run, or one whole context, as memory allows; on a GPU all there is."""
        wanted = max(self.settings.max_running * USUAL_TOKENS, self.max_model_len)
        if self.placement.device.type == "cuda":
            wanted, free = MAX_KV_TOKENS, self._free_gpu_bytes()
        else:
            workers = self.settings.tensor_parallel * self.settings.data_parallel
            free = available_bytes() // workers  # all of them look at the same memory
        room = int(free * self.settings.memory_fraction) // self.decoder.kv_bytes_per_token
        if room < 2:
            raise ValueError(
                f"memory_fraction {self.settings.memory_fraction} of what is free leaves no room for a KV cache"
            )
        return min(wanted, room)

    def _free_gpu_bytes(self) -> int:
        """What is left when the largest step has what it takes: it is run once, with a KV cache of one token."""
        torch.cuda.reset_peak_memory_stats()
        runner = self.runner(1)
        warm_up(runner, self.warm_up_lengths()[-1:], everything=True)
        del runner
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] - peak


def _device(placement: Placement, settings: Settings) -> Device:
    is_checked = settings.debug == "on"
    if placement.device.type == "cuda":
        from backend_lib.worker.cuda import Cuda, CudaDevice

        device = CudaDevice(cuda_guard if is_checked else no_guard, Cuda())
        torch.cuda.set_stream(device.compute)
        return device
    return CpuDevice(cpu_guard if is_checked and placement.by_kernels else no_guard)


def _share_threads(settings: Settings, placement: Placement) -> None:
    """A team of threads takes all cores, since it can give way to Triton and the router. torch gets one less."""
    quantised = placement.weights in QUANTISED
    cores = usable_cores()
    share_threads(settings.threads or (cores if quantised else max(1, cores - 1)), quantised=quantised)


def _overlap(placement: Placement, settings: Settings) -> bool:
    """On a CPU `auto` is off: see benchmarks/loop.py."""
    if placement.device.type == "cuda":
        return settings.overlap != "off"
    if settings.overlap != "on":
        return False
    sys.setswitchinterval(SWITCH_INTERVAL)
    return True
