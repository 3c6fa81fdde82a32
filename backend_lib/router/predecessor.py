"""Whether this model's previous instance still lives: when a model is reloaded, Triton starts the new one first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PARENT, _START = 1, 19  # fields of /proc/PID/stat, counted from the one after the command's name


class _Process(NamedTuple):
    pid: int
    parent: int
    start: int
    argv: list[str]


def has_predecessor(instance: str, version: str) -> bool:
    """Whether tritonserver has an older stub process for the same instance name and model version."""
    me = _read(os.getpid())
    assert me is not None
    others = (_read(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit())
    return any(
        each.parent == me.parent
        and (each.start, each.pid) < (me.start, me.pid)
        and instance in each.argv
        and Path(each.argv[1]).parent.name == version
        for each in others
        if each and len(each.argv) > 1
    )


def _read(pid: int) -> _Process | None:
    """None when it has ended. One that nobody has reaped yet has no arguments any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return _Process(pid, int(fields[_PARENT]), int(fields[_START]), argv)
