"""Places where a test can have a worker killed. Inert unless the environment asks for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

# In the order of a worker's life and of a pass of its loop.
POINTS = (
    "loading",
    "joined",  # has met the other ranks; of several only
    "loaded",  # but not yet READY
    "ready",
    "commands read",
    "decided",  # and the others can know, but have not been woken; of rank 0 of several
    "commands applied",  # but the cursor stands before them
    "cursor moved",
    "paused",  # a sequence is taken out of the plan
    "mid-prefill",  # a piece of a prompt is launched that is not its last
    "launched",
    "sampled",
    "ids written",  # but not published
    "freed",  # a sequence has ended and its row and KV are back, but it is not published
    "half published",  # some of the step's slots
    "published",  # but not on the dirty list
    "listed",  # but the router has not been woken
)

_armed: dict[str, int] = {}  # times that a point is still to be passed


def arm(environment: Mapping[str, str], epoch: int, rank: int) -> None:
    """Read TANDEM_CRASH_POINTS, `epoch:point:times` joined by commas: the group's workers of that epoch are killed when
    they come to the point for the n-th time. With `epoch.rank` that one is.
    """
    for entry in filter(None, environment.get("TANDEM_CRASH_POINTS", "").split(",")):
        at, point, times = entry.split(":")
        assert point in POINTS, point
        if at in (str(epoch), f"{epoch}.{rank}"):
            _armed[point] = int(times)


def reach(point: str) -> None:
    if point not in _armed:
        return
    _armed[point] -= 1
    if _armed[point] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
