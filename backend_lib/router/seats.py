"""Where each worker computes: its GPU, or its cores."""

from __future__ import annotations

import os
import re
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from backend_lib.checkpoint import Checkpoint, DecoderConfig, HashConfig, check_ranks
from backend_lib.config import Settings, gpu_is_visible
from backend_lib.cores import usable_cores

_DEVICES = Path("/dev")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAX_NUMBER_CHARS = 4


class Seat(NamedTuple):
    """A worker's place. `gpu`: what its CUDA_VISIBLE_DEVICES says; "" leaves that alone. `cores`: those it may run on;
    none leaves that alone."""

    gpu: str = ""
    cores: tuple[int, ...] = ()


class Seating(NamedTuple):
    """A seat for each rank of each group; the settings, with `threads` where workers share cores; words for the log."""

    seats: list[list[Seat]]
    settings: Settings
    words: str = ""


def seat_workers(settings: Settings, checkpoint: Checkpoint) -> Seating:
    """Raises ValueError naming a setting that machine or checkpoint cannot follow, its value and what is allowed."""
    if isinstance(checkpoint.config, DecoderConfig):
        check_ranks(checkpoint.config, settings.tensor_parallel)
    count = settings.tensor_parallel * settings.data_parallel
    # The test-only model stays on the CPU.
    if isinstance(checkpoint.config, HashConfig) or not _on_gpu(settings):
        _check_no_gpus(settings)
        return _on_cpu(settings, count)
    gpus = _chosen_gpus(settings, visible_gpus(), count)
    words = f"workers compute on the GPUs {', '.join(gpus)}" if gpus and count > 1 else ""
    return Seating(_by_group(settings, [Seat(gpu=gpu) for gpu in gpus] or [Seat()] * count), settings, words)


def visible_gpus() -> list[str]:
    """What CUDA would count, by names that it takes. As CUDA does, what follows an entry that is none is hidden."""
    text = os.environ.get(_VISIBLE)
    if text is None:
        return [str(number) for number, _ in enumerate(_DEVICES.glob("nvidia[0-9]*"))]
    names = []
    for name in (entry.strip() for entry in text.split(",")):
        if not re.fullmatch(r"[0-9]+|(GPU|MIG)-.+", name):
            break
        names.append(name)
    return names


def _on_gpu(settings: Settings) -> bool:
    return settings.device == "cuda" or (settings.device == "auto" and gpu_is_visible())


def _check_no_gpus(settings: Settings) -> None:
    if settings.gpus != "auto":
        where = f"device '{settings.device}'" if settings.device in ("cpu", "interpret") else "workers on the CPU"
        raise ValueError(f"parameter 'gpus' is {reprlib.repr(settings.gpus)}; allowed with {where} is auto")


def _chosen_gpus(settings: Settings, visible: list[str], count: int) -> list[str]:
    """A GPU for each worker; none when none is to be seen, which the workers will have words for."""
    if settings.gpus != "auto":
        return [visible[number] for number in _numbers(settings, len(visible), count)]
    if visible and len(visible) < count:
        raise ValueError(
            f"parameter 'data_parallel' is {settings.data_parallel} and 'tensor_parallel' {settings.tensor_parallel}, "
            f"which takes {count} GPUs; allowed are as many as are visible, {len(visible)}"
        )
    return visible[:count]


def _numbers(settings: Settings, num_visible: int, count: int) -> list[int]:
    """The setting `gpus` as numbers."""
    texts = [text.strip() for text in settings.gpus.split(",")]
    if not all(re.fullmatch(rf"[0-9]{{1,{_MAX_NUMBER_CHARS}}}", text) for text in texts):
        _refuse(settings, "allowed is auto, or numbers with commas between them, such as 0,1")
    numbers = [int(text) for text in texts]
    for number in numbers:
        if numbers.count(number) > 1:
            _refuse(settings, f"allowed is each number once, and {number} is there twice")
        if number >= num_visible:
            last = f"those from 0 to {num_visible - 1}" if num_visible else "none, since no GPU is visible"
            _refuse(settings, f"allowed are {last}")
    if len(numbers) != count:
        product = f"tensor_parallel {settings.tensor_parallel} times data_parallel {settings.data_parallel}"
        _refuse(settings, f"allowed are as many as there are workers, {count}: {product}")
    return numbers


def _refuse(settings: Settings, allowed: str) -> None:
    raise ValueError(f"parameter 'gpus' is {reprlib.repr(settings.gpus)}; {allowed}")


def _on_cpu(settings: Settings, count: int) -> Seating:
    """Cores of its own for each worker, where there are enough."""
    usable, allowed = usable_cores(), sorted(os.sched_getaffinity(0))
    share, threads = usable // count, settings.threads
    if count == 1:
        return Seating([[Seat()]], settings)
    if share < (threads or 1):
        words = f"{count} workers share the cores, of which they may use {usable}; threads of each: {threads or 1}"
        return Seating(_by_group(settings, [Seat()] * count), replace(settings, threads=threads or 1), words)
    parts = [tuple(allowed[number * share : (number + 1) * share]) for number in range(count)]
    words = f"{count} workers have cores of their own: {'; '.join(', '.join(map(str, part)) for part in parts)}"
    return Seating(_by_group(settings, [Seat(cores=part) for part in parts]), settings, words)


def _by_group(settings: Settings, seats: list[Seat]) -> list[list[Seat]]:
    """Ranks of a group beside each other."""
    size = settings.tensor_parallel
    return [seats[group * size : (group + 1) * size] for group in range(settings.data_parallel)]
