"""One decoder in a process of its own: loaded as the worker loads it, then asked for window after window."""

from __future__ import annotations

import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.multiprocessing

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import Decoder, build, load_decoder
from backend_lib.models.decoder import TransformerDecoder
from backend_lib.models.linear import QUANTISED, DenseLinear, Fp16Linear, Linear
from backend_lib.models.mlp import GatedMLP
from backend_lib.models.placement import weight_format
from backend_lib.models.threads import share_threads
from benchmarks.formats.comparators import COMPARATORS, FbgemmInt8Linear, RoundedLinear
from benchmarks.formats.divergence import Quality, Tally
from tests.support.forward import ForwardDriver

REFERENCE = "fp32"


class Costs(NamedTuple):
    """`read_bytes`: of weights, for one token; None where the layers only imitate a format."""

    read_bytes: int | None
    resident_bytes: int
    load_seconds: float


class Result(NamedTuple):
    name: str
    costs: Costs
    quality: Quality
    tokens_per_second: float


@dataclass(frozen=True)
class Task:
    """What to load: `name` is a value of the setting `weights`, or one of `COMPARATORS`."""

    name: str
    model: str
    dtype: str
    threads: int
    chunk: int


class Subject:
    """The parent's end. `shared`: float32 [window, V] in shared memory, the reference's logits."""

    def __init__(self, task: Task, shared: torch.Tensor) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.task = task
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(task, theirs, shared), daemon=True)
        self._process.start()
        theirs.close()
        self.costs: Costs = self._pipe.recv()

    def compute(self, ids: list[int]) -> None:
        """Returns when the window is computed and, but for the reference itself, compared."""
        self._pipe.send(ids)
        self._pipe.recv()

    def result(self) -> Result:
        self._pipe.send(None)
        quality, speed = self._pipe.recv()
        self._process.join()
        return Result(self.task.name, self.costs, quality, speed)


def _serve(task: Task, pipe: Connection, shared: torch.Tensor) -> None:
    decoder, seconds = load(task)
    pipe.send(Costs(read_bytes(decoder), resident_bytes(), seconds))
    tally, spent, computed = Tally(), 0.0, 0
    while (ids := pipe.recv()) is not None:
        started = time.monotonic()
        logits = window_logits(decoder, ids, task.chunk)
        spent, computed = spent + time.monotonic() - started, computed + len(ids)
        if task.name == REFERENCE:
            shared[: len(ids)] = logits
        tally.add(logits[:-1], shared[: len(ids) - 1], torch.tensor(ids[1:]))
        pipe.send(None)
    pipe.send((tally.quality(), computed / spent))


def load(task: Task) -> tuple[Decoder, float]:
    """A decoder, and how many seconds it took to load; threads as the worker has them."""
    comparator = COMPARATORS.get(task.name)
    settings = Settings(model=task.model, dtype=task.dtype, weights=REFERENCE if comparator else task.name)
    share_threads(task.threads, quantised=weight_format(settings) in QUANTISED)
    checkpoint = open_checkpoint(settings.model)
    started = time.monotonic()
    with mock.patch.object(build, "make_linear", comparator or build.make_linear):
        decoder = load_decoder(checkpoint, settings)
    return decoder, time.monotonic() - started


def window_logits(decoder: Decoder, ids: list[int], chunk: int) -> torch.Tensor:
    """float32 [len(ids), V] of one sequence that begins with them, computed so many at a time."""
    driver = ForwardDriver(decoder, rows=1, max_len=len(ids))
    row = driver.add(ids)
    parts = []
    while left := driver.waiting(row):
        parts.append(driver.step({row: min(left, chunk)})[row].clone())  # valid until the next step
    return torch.cat(parts)


def read_bytes(decoder: Any) -> int | None:
    """Weights of all linear layers: of experts, all. Padding that a format's packing adds is not counted."""
    decoder = getattr(decoder, "_decoder", decoder)
    assert isinstance(decoder, TransformerDecoder)
    sizes = [_linear_bytes(each) for each in _linears(decoder)]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _linears(decoder: TransformerDecoder) -> list[Linear]:
    linears = [decoder.head]
    for layer in decoder.layers:
        gated = [layer.mlp] if isinstance(layer.mlp, GatedMLP) else list(layer.mlp.experts)
        linears += [layer.attention.qkv, layer.attention.output]
        linears += [linear for each in gated for linear in (each.gate_up, each.down)]
    return linears


def _linear_bytes(linear: Any) -> int | None:
    if isinstance(linear, RoundedLinear):
        return None
    if isinstance(linear, DenseLinear):
        return linear.weight.nbytes
    if isinstance(linear, Fp16Linear):
        return 2 * torch.ops.quantized.linear_unpack_fp16(linear.packed)[0].numel()
    if isinstance(linear, FbgemmInt8Linear):
        return linear.packed.unpack()[0].numel()
    return linear.packed.nbytes


def resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024
