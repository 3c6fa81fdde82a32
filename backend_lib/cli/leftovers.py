"""What a killed `tandem serve` left behind: its folder and its regions in shared memory, found by the owner's mark."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

# The process, its start (a number may be given again), and its PID namespace (containers may share /tmp or /dev/shm).
_MARKED = re.compile(r"tandem[-_](?P<pid>\d+)_(?P<start>\d+)_(?P<namespace>\d+)_")
_START_FIELD = 22  # of /proc/PID/stat, counted from 1; clock ticks since boot


def owner_mark() -> str:
    """This process, as its folder's and regions' names have it after `tandem-` or `tandem_`."""
    return f"{os.getpid()}_{_start(os.getpid())}_{_namespace()}_"


def remove_leftovers(*places: Path) -> None:
    """Remove what dead processes of this user and PID namespace left in `places`."""
    for place in places:
        for entry in place.glob("tandem[-_]*"):
            found = _MARKED.match(entry.name)
            if found and _is_ours(entry, found) and _start(int(found["pid"])) != int(found["start"]):
                _remove(entry)


def _is_ours(entry: Path, found: re.Match[str]) -> bool:
    try:
        return entry.lstat().st_uid == os.getuid() and int(found["namespace"]) == _namespace()
    except FileNotFoundError:  # its owner, or another server that starts now, was faster
        return False


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            entry.unlink()


def _start(pid: int) -> int | None:
    """When a process started; None when there is none of that number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name, field 2, stands in parentheses and may hold anything.
    return int(stat.rpartition(")")[2].split()[_START_FIELD - 3])


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
