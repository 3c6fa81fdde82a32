"""Block sizes, warps and stages: what a kernel's file gives, or what `tune` found to be fastest on this GPU.

What was found is kept in a JSON file in the user's cache, for each kind of GPU and version of Triton. It is read once,
at the first launch, so that nothing changes under a captured graph.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from kernels.private_folder import private_folder

log = logging.getLogger("tandem")

_REPEATS = 7  # of which the median counts
_LARGEST_FILE = 1 << 20  # bytes


class Config(NamedTuple):
    """How a kernel is launched. `blocks` are its constants by name."""

    blocks: Mapping[str, int]
    num_warps: int
    num_stages: int = 2


Timer = Callable[[Callable[[], None]], float]


def chosen(kernel: str, key: str, default: Config) -> Config:
    """What was found for a kernel and a key (its sizes and dtype, in words); the default if nothing was."""
    found = _found().get(_entry(kernel, key))
    return found if found is not None and set(found.blocks) == set(default.blocks) else default


def tune(
    kernel: str, key: str, candidates: Iterable[Config], run: Callable[[Config], None], timer: Timer | None = None
) -> Config:
    """The fastest candidate, which processes that start from now on will choose.

    Args:
        run: launches the kernel once. What raises (too much shared memory, say) is no candidate.
        timer: seconds of a call; by CUDA events if not given.

    Raises:
        RuntimeError: no candidate ran.
    """
    times = [(took, config) for config in candidates if (took := _time(run, config, timer or _gpu_seconds)) is not None]
    if not times:
        raise RuntimeError(f"no configuration of {kernel} for {key} runs")
    best = min(times, key=lambda each: each[0])[1]
    path = _path()
    _write(path, {**_read(path), _entry(kernel, key): best})
    return best


def _entry(kernel: str, key: str) -> str:
    return f"{kernel} {key}"


def _time(run: Callable[[Config], None], config: Config, timer: Timer) -> float | None:
    try:
        run(config)  # compiles it, and warms the caches
        return median(timer(lambda: run(config)) for _ in range(_REPEATS))
    except Exception as error:  # each version of Triton raises its own
        log.info("%s does not run: %s", config, error)
        return None


def _gpu_seconds(call: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


@cache
def _found() -> dict[str, Config]:
    return _read(_path()) if torch.cuda.is_available() else {}


def _read(path: Path) -> dict[str, Config]:
    """Nothing if there is no such file, or it is not as `_write` makes it."""
    try:
        return {name: _config(value) for name, value in json.loads(_bytes_of(path)).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        log.warning("the kernels' configurations in %s are not used: %s", path, error)
        return {}


def _bytes_of(path: Path) -> bytes:
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ValueError("others can write to it")
    if status.st_size > _LARGEST_FILE:
        raise ValueError("it is too large")
    return path.read_bytes()


def _config(value: Any) -> Config:
    blocks = {str(name): _whole(size) for name, size in value["blocks"].items()}
    return Config(blocks, _whole(value["num_warps"]), _whole(value["num_stages"]))


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 < value <= 1 << 20:
        raise ValueError(f"{value!r} is no size")
    return value


def _write(path: Path, found: Mapping[str, Config]) -> None:
    """All of it or nothing, also beside another process that writes."""
    text = json.dumps({name: config._asdict() for name, config in sorted(found.items())}, indent=1)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    Path(temporary).replace(path)


def _path() -> Path:
    import triton  # not above: the CPU's worker does without its 70 MiB

    name = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{torch.cuda.get_device_name()}-triton-{triton.__version__}")
    return private_folder("tuned") / f"{name}.json"
