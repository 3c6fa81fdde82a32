"""What the ranks of a group compute together: each holds a part of every large matrix (Shoeybi et al., 2019)."""

from __future__ import annotations

from typing import Protocol

import torch

# T tokens in the step · E hidden size · L tokens whose logits are wanted


class Ranks(Protocol):
    """The ranks that hold one copy of the weights, as one of them sees them. All make the same calls in one order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace contiguous [T, E] by the sum over all ranks."""

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """From [L, n] on each rank, of one size, to [L, size * n] on rank 0, in the order of the ranks; None on the
        others."""


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> None: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        return x


ALONE = Alone()
