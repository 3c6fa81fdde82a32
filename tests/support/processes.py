"""Processes that end. A zombie has ended: only its parent has not looked yet."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

import psutil


def has_ended(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def wait_ended(processes: Iterable[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Those that still run when the time is up."""
    deadline = time.monotonic() + timeout
    alive = list(processes)
    while (alive := [process for process in alive if not has_ended(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive
