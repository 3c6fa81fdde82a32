"""The heap behind the slots: each slot has one extent, sized to what its request asked for. The router's alone."""

from __future__ import annotations

import bisect

from backend_lib.arena.layout import align


class ExtentAllocator:
    """First fit over `num_bytes`, in units of a cache line; neighbours are joined when freed.

    First fit keeps the extents low, so that a heap made for the worst case touches only the memory it needs.
    """

    def __init__(self, num_bytes: int) -> None:
        self._starts = [0]
        self._sizes = [num_bytes]
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return sum(self._sizes)

    def allocate(self, num_bytes: int) -> int | None:
        """Offset of a new extent, or None when none of the holes is large enough."""
        size = align(max(num_bytes, 1))
        for hole, room in enumerate(self._sizes):
            if room >= size:
                return self._take(hole, size)
        return None

    def free(self, offset: int) -> None:
        size = self._taken.pop(offset)
        hole = bisect.bisect_left(self._starts, offset)
        self._starts.insert(hole, offset)
        self._sizes.insert(hole, size)
        self._join(hole)
        if hole > 0:
            self._join(hole - 1)

    def _take(self, hole: int, size: int) -> int:
        offset = self._starts[hole]
        self._taken[offset] = size
        if self._sizes[hole] == size:
            del self._starts[hole], self._sizes[hole]
        else:
            self._starts[hole] += size
            self._sizes[hole] -= size
        return offset

    def _join(self, hole: int) -> None:
        """Merge a hole with the next one when they touch."""
        if hole + 1 < len(self._starts) and self._starts[hole] + self._sizes[hole] == self._starts[hole + 1]:
            self._sizes[hole] += self._sizes.pop(hole + 1)
            del self._starts[hole + 1]
