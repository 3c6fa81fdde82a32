"""Memory of a process and of all that it started."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

_MIB_OF_KIB = 1 / 1024


class Memory(NamedTuple):
    """MiB, summed over processes. What is shared is counted once in `now` and in each process in `peak`."""

    now: float  # proportional set size
    peak: float  # highest resident set size of each


def memory_of(pid: int) -> Memory:
    pids = family(pid)
    return Memory(
        sum(_kib(each, "smaps_rollup", "Pss") for each in pids) * _MIB_OF_KIB,
        sum(_kib(each, "status", "VmHWM") for each in pids) * _MIB_OF_KIB,
    )


def family(pid: int) -> list[int]:
    """The process, its descendants, and those of its session, which may have outlived their parents."""
    found = {each for each in psutil.pids() if _session(each) == pid}
    with contextlib.suppress(psutil.NoSuchProcess):
        found |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
    return sorted(found)


def _session(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid)
    return None


def end_family(pids: Iterable[int], seconds: float = 10.0) -> None:
    """End them, politely first. They are found before: the children of a process that has ended are nobody's."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    for act in ("terminate", "kill"):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                getattr(process, act)()
        _, processes = psutil.wait_procs(processes, timeout=seconds)


def _kib(pid: int, name: str, key: str) -> int:
    """0 when the process has ended meanwhile."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = re.search(rf"^{key}:\s+(\d+) kB", Path(f"/proc/{pid}/{name}").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0
