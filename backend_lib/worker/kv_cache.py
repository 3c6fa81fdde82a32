"""The bookkeeping of KV memory: which token index is free, and which one holds a row's position."""

from __future__ import annotations

import numpy as np


class KvCache:
    """`num_tokens` indices handed out one by one, and the table row × position → index.

    Free indices stand on a stack whose top gives ascending runs while nothing has been freed. The table is the CPU's
    copy; the device's is written by the step that first uses an index.
    """

    def __init__(self, *, num_tokens: int, num_rows: int, max_len: int) -> None:
        self.num_tokens = num_tokens
        self.table = np.zeros((num_rows, max_len), dtype=np.int32)
        self._free = np.arange(num_tokens - 1, -1, -1, dtype=np.int32)
        self._num_free = num_tokens

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def free(self) -> np.ndarray:
        """int32 [num_free], in the order in which they will be handed out, from the end."""
        return self._free[: self._num_free]

    def allocate(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 [T] indices for the T places (rows[t], positions[t]). The caller has made sure that there is room."""
        count = len(rows)
        assert count <= self._num_free, f"{count} KV indices wanted, {self._num_free} are free"
        self._num_free -= count
        indices = self._free[self._num_free : self._num_free + count][::-1].astype(np.int64)
        self.table[rows, positions] = indices
        return indices

    def give_back(self, indices: np.ndarray) -> None:
        """Make indices free again."""
        self._free[self._num_free : self._num_free + len(indices)] = indices[::-1]
        self._num_free += len(indices)
