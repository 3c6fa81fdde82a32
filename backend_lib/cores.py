"""How many processors a process may use: the router divides them among workers, a worker among threads."""

from __future__ import annotations

import math
import os
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Processors that this process may run on, within the container's quota of processor time when there is one.

    A quota of two and a half is two: a third thread would be stopped for a part of each period, and the others wait.
    """
    cores = len(os.sched_getaffinity(0))
    quota = min((_quota(folder) for folder in _folders(root, own)), default=math.inf)
    return max(1, min(cores, int(quota) if quota < cores else cores))


def _folders(root: Path, own: Path) -> list[Path]:
    """This process's control group and those around it, each of which may have a quota.

    A container often sees its own group as the root, and names in `own` that only the host can follow.
    """
    parts = [part for line in _lines(own) for part in _groups(line)]
    return [root / part for part in dict.fromkeys(["", "cpu", *parts])]


def _groups(line: str) -> list[str]:
    """From `hierarchy:controllers:path`, folders below the root; version 2 has no controllers."""
    _, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if controllers and "cpu" not in controllers.split(","):
        return []
    names = [name for name in path.split("/") if name]
    if ".." in names:  # a group outside of what is mounted here
        return []
    bases = ["cpu", controllers] if controllers else [""]
    return ["/".join([base, *names[:count]]).strip("/") for base in bases for count in range(len(names) + 1)]


def _quota(folder: Path) -> float:
    """Processors' worth of time, by either version of control groups; infinite without a limit."""
    words = _words(folder / "cpu.max") or [
        *_words(folder / "cpu.cfs_quota_us"),
        *_words(folder / "cpu.cfs_period_us"),
    ]
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # `max`, no files, or files that nobody can make sense of
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except (OSError, ValueError):  # ValueError: a name with a null character
        return []
