"""Whose turn it is on the cores of a machine without a GPU.

Many short turns of Triton and the router would each take a core from a thread that computes, and the others would wait
for it. As SCHED_BATCH a thread gets its share, but takes no core from another the moment it wakes up.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def give_way(pid: int) -> None:
    """Let a process's threads, and what they start, wait for their turn. Where that is forbidden nothing happens."""
    for thread in _threads(pid):
        _set_policy(thread, os.SCHED_BATCH)


def take_turns() -> None:
    """Undo for this process what it was started with. Before other threads are started."""
    _set_policy(0, os.SCHED_OTHER)


def _threads(pid: int) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def _set_policy(thread: int, policy: int) -> None:
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(thread) in (os.SCHED_OTHER, os.SCHED_BATCH):
            os.sched_setscheduler(thread, policy, os.sched_param(0))
