"""Finding stop strings in text that arrives in pieces."""

from __future__ import annotations


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may be the beginning of one.

    The match that is complete first wins, and among those that end together the longest: so the answer does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False):
        self._stop = stop
        self._include = include
        self._first = frozenset(text[0] for text in stop)
        self._held = ""

    def push(self, text: str, may_match: bool = True) -> tuple[str, bool]:
        """Text that may be shown, and whether a stop string has ended it. After a match the rest is gone.

        With `may_match` false no match ends in this piece, yet one may begin in it.
        """
        if not self._held and self._first.isdisjoint(text):
            return text, False
        seen, buffer = len(self._held), self._held + text
        match = self._match(buffer, seen) if may_match else None
        if match:
            self._held = ""
            start, end = match
            return buffer[: end if self._include else start], True
        cut = self._open_start(buffer)
        self._held = buffer[cut:]
        return buffer[:cut], False

    def flush(self) -> str:
        """What was held back and turned out to be no stop string. The text has ended."""
        held, self._held = self._held, ""
        return held

    def _match(self, buffer: str, seen: int) -> tuple[int, int] | None:
        """(start, end) of the stop string that ends first, after the `seen` characters that were searched before."""
        found = []
        for stop in self._stop:
            start = buffer.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _open_start(self, buffer: str) -> int:
        """Where the longest end of the buffer begins that is the beginning of a stop string, but not all of it."""
        for start, character in enumerate(buffer):
            if character in self._first and self._is_open(buffer[start:]):
                return start
        return len(buffer)

    def _is_open(self, tail: str) -> bool:
        return any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stop)
