"""What a tensor must look like, and the blocks of rows in which it is copied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

_BLOCK_BYTES = 16 << 20


def check_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises ValueError naming the tensor, its shape and the one wanted."""
    if tuple(shape) != tuple(wanted):
        raise ValueError(f"tensor '{name}' has the shape {list(shape)}; the configuration asks for {list(wanted)}")


def row_blocks(shape: Sequence[int], item_bytes: int = 4) -> Iterator[slice]:
    """Slices of the first dimension that hold some 16 MB each."""
    rows = shape[0]
    row_bytes = max(1, item_bytes * math.prod(shape[1:]))
    step = max(1, _BLOCK_BYTES // row_bytes)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
