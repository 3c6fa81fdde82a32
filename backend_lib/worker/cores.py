"""How many processors a worker may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def usable_cores(root: Path = _ROOT) -> int:
    """Processors that this process may run on, within the container's quota of processor time when there is one.

    A quota of two and a half is two: a third thread would be stopped for a part of each period, and the others wait.
    """
    cores = len(os.sched_getaffinity(0))
    quota = min((_quota(folder) for folder in _folders(root)), default=math.inf)
    return max(1, min(cores, int(quota) if quota < cores else cores))


def _folders(root: Path) -> list[Path]:
    """This process's control group and those around it, each of which may have a quota."""
    return [root, *(root / part for part in _own_group())]


def _own_group() -> list[str]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            base = "" if controllers == "" else "cpu"
            parts = path.strip("/").split("/")
            found += ["/".join([base, *parts[:count]]).strip("/") for count in range(len(parts) + 1)]
    return found


def _quota(folder: Path) -> float:
    """Processors' worth of time, by either version of control groups; infinite without a limit."""
    words = _words(folder / "cpu.max") or [
        *_words(folder / "cpu.cfs_quota_us"),
        *_words(folder / "cpu.cfs_period_us"),
    ]
    if len(words) != 2 or words[0] == "max" or int(words[0]) <= 0:
        return math.inf
    return int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
