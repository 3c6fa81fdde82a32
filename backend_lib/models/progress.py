"""How far the loading of the weights is, in the worker's log."""

from __future__ import annotations

import logging
import time

from backend_lib.checkpoint.byte_words import bytes_of

log = logging.getLogger("tandem")

SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """Counts the bytes read and says so now and then. Nothing is said of a model that is loaded at once.

    `total_bytes` may be a little wrong: shares of a checkpoint are not all equal.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES

    def add(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes
        if time.monotonic() < self._next_line:
            return
        self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
        share = min(100, 100 * self.done_bytes // max(self.total_bytes, 1))
        log.info("loading: %d %% (%s)", share, bytes_of(min(self.done_bytes, self.total_bytes), self.total_bytes))
