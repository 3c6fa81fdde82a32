"""Whether one more sequence fits: the past-future estimate of the KV cache's peak.

The past is the output lengths of sequences that have ended; the future is how the running ones will grow until each of
them ends. After "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., 2025).
"""

from __future__ import annotations

import bisect
from collections import deque

import numpy as np

HISTORY = 512
# A sequence is taken to end where this share of those ended that grew longer than it has.
QUANTILE = 0.75
# Below this many lengths the past says nothing, and every sequence is taken to use all it may.
MIN_HISTORY = 16


class OutputHistory:
    """Output lengths of the sequences that ended last. The same on every rank, for it is fed by the plan's ends."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque()
        self._sorted: list[int] = []
        self._array: np.ndarray | None = None  # the same, made when it is asked for

    def add(self, output_len: int) -> None:
        if len(self._lengths) == HISTORY:
            del self._sorted[bisect.bisect_left(self._sorted, self._lengths.popleft())]
        self._lengths.append(output_len)
        bisect.insort(self._sorted, output_len)
        self._array = None

    def remaining(self, produced: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        """int64 [n] tokens that sequences will still produce, which have `produced` and may have `allowed` in all."""
        if len(self._sorted) < MIN_HISTORY:
            return allowed - produced
        if self._array is None:
            self._array = np.array(self._sorted, dtype=np.int64)
        lengths = self._array
        shorter = np.searchsorted(lengths, produced, side="right")
        longer = len(lengths) - shorter
        place = np.minimum(shorter + (longer * QUANTILE).astype(np.int64), len(lengths) - 1)
        predicted = np.where(longer > 0, lengths[place], allowed)
        return np.clip(predicted, produced + 1, allowed) - produced


def peak(held: np.ndarray, remaining: np.ndarray) -> int:
    """The most KV that sequences come to hold: each grows by one a step and frees all when it ends.

    Args:
        held: int64 [n], tokens each holds now, or will hold before its first output.
        remaining: int64 [n], tokens each will still produce.
    """
    order = np.argsort(-remaining, kind="stable")
    # When the i-th of these ends, the i before it still run, and all of them have grown by what it had left.
    at_ends = np.cumsum(held[order]) + remaining[order] * np.arange(1, len(held) + 1)
    return int(at_ends.max()) if len(held) else 0
