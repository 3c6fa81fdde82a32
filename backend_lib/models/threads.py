"""Threads that compute on a CPU: torch's own, or a team that runs the kernels' programs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.cpu.team import Team

_team_size = 1


def share_threads(count: int, *, quantised: bool) -> None:
    """`count` threads for what computes most: the team with quantised weights, and torch with others.

    To be called before `team`. What is left to torch then is small, and its threads would only be in the way: they spin
    at barriers until each has had its turn on a core, which takes milliseconds when somebody else wants the core.
    """
    global _team_size
    _team_size = count
    torch.set_num_threads(1 if quantised else count)


@functools.cache
def team() -> Team:
    from kernels.cpu.team import Team  # numba takes a second to import

    return Team(_team_size)
