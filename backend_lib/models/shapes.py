"""What a tensor must look like, which part of it is wanted, and the blocks of rows in which it is copied."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_BLOCK_BYTES = 16 << 20


class Part(NamedTuple):
    """What is wanted of a tensor.

    Attributes:
        shape: the whole tensor's.
        rows: of its first dimension.
        columns: of its second; None for all of them, or where there are none.
    """

    shape: tuple[int, ...]
    rows: range
    columns: range | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        return cls(tuple(shape), range(shape[0]))

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the part."""
        return (len(self.rows), *(self.shape[1:] if self.columns is None else [len(self.columns)]))

    def row_blocks(self) -> Iterator[tuple[slice, slice]]:
        """Slices of the part, and of the whole tensor, that hold some 16 MB each."""
        for block in row_blocks(self.size):
            yield block, slice(self.rows.start + block.start, self.rows.start + block.stop)


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
