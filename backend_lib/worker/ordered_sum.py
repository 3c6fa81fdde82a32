"""A sum over the ranks of a group in the order of the ranks.

Gloo's own goes around a ring, and where in the ring a number's sum begins depends on how many numbers there are. So a
token's would be rounded otherwise when more tokens are computed with it, and a sequence that is resumed would not go
on as it would have.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

# n ranks · c numbers that a rank adds up for all


def ordered_all_reduce(x: torch.Tensor, size: int) -> None:
    """Replace a contiguous tensor by the sum over all ranks, the same on all of them to the last bit.

    Each rank adds up an equal part, which costs as much traffic as a ring.
    """
    flat = x.view(-1)
    missing = -len(flat) % size
    mine = F.pad(flat, (0, missing)) if missing else flat
    parts = torch.empty_like(mine)
    dist.all_to_all_single(parts, mine)
    total, *others = parts.chunk(size)  # [c] each, of rank 0, of rank 1, ...
    for other in others:
        total += other
    whole = torch.empty_like(mine)
    dist.all_gather_single(whole, total)
    flat.copy_(whole[: len(flat)])
