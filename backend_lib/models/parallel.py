"""What the ranks of a group compute together: each holds a part of every large matrix (see `division`)."""

from __future__ import annotations

from typing import Protocol

import torch

# T tokens in the step · E hidden size · L tokens whose logits are wanted


class Ranks(Protocol):
    """The ranks that hold one copy of the weights, as one of them sees them. All make the same calls in one order.

    What a sum gives is the same on all of them to the last bit: each chooses a token's experts by itself.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace contiguous [T, E] by the sum over all ranks, in its own type."""

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """From contiguous [L, n] on each rank, of one size, to [L, size * n] on rank 0, in the order of the ranks; None
        on the others."""


class Alone:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> None: ...

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        return x


ALONE = Alone()


def own_places(ids: torch.Tensor, vocabulary: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Where int64 [T] ids stand among a rank's rows of the embedding, and which have none, bool [T, 1], and place 0."""
    places = ids - vocabulary.start
    is_elsewhere = (places < 0) | (places >= len(vocabulary))
    return places.masked_fill_(is_elsewhere, 0), is_elsewhere[:, None]


def gathered(logits: torch.Tensor, vocab_size: int, ranks: Ranks) -> torch.Tensor:
    """From float32 [L, n], a rank's share, to [L, V] on rank 0 and [L, 0] on the others."""
    if not len(logits):  # libraries differ in what they make of nothing
        return logits.new_empty((0, 0 if ranks.rank else vocab_size))
    whole = ranks.gather(logits.contiguous())
    return logits[:, :0] if whole is None else whole[:, :vocab_size]
