"""A line on stderr that is rewritten while a level runs; nothing when stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_WIDTH = 24
_REDRAW_SECONDS = 0.2


class Progress:
    """Bar, answers and tokens of one level. `requests` or `seconds` say how long the bar is; one of them is None."""

    def __init__(self, label: str, requests: int | None, seconds: float | None, out: TextIO = sys.stderr) -> None:
        self._label, self._requests, self._seconds, self._out = label, requests, seconds, out
        self._shown = out.isatty()
        self._started = time.perf_counter()
        self._drawn = 0.0
        self._answers = self._tokens = 0

    def received(self, tokens: int) -> None:
        self._tokens += tokens
        self._redraw()

    def answered(self) -> None:
        self._answers += 1
        self._redraw()

    def close(self) -> None:
        """Clear the line."""
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()

    def line(self, elapsed: float) -> str:
        """What is shown after so many seconds."""
        done = elapsed / self._seconds if self._seconds else self._answers / (self._requests or 1)
        bar = "#" * int(_WIDTH * min(done, 1.0))
        of = f"/{self._requests}" if self._requests else ""
        speed = self._tokens / elapsed if elapsed else 0.0
        return f"{self._label} [{bar:<{_WIDTH}}] {self._answers}{of} answers, {speed:.0f} tokens/s, {elapsed:.0f} s"

    def _redraw(self) -> None:
        now = time.perf_counter()
        if self._shown and now - self._drawn > _REDRAW_SECONDS:
            self._drawn = now
            self._out.write(f"\r\x1b[K{self.line(now - self._started)}")
            self._out.flush()
