"""Finds the request that kills workers, without blaming those that only ran beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from backend_lib.router.stream import Stream

# A sequence that was in the batch at so many deaths of a worker, without a token in between, is a suspect.
SUSPECT_DEATHS = 2


def is_suspect(stream: Stream) -> bool:
    return stream.deaths >= SUSPECT_DEATHS


class Trial:
    """One worker's life as a trial: suspects are given to it one at a time, before anything else, the worst first.

    A suspect that publishes a token is cleared and goes on, so the one after it is alone among those that could be to
    blame, but not alone in the batch. When the worker dies on that one, it comes first in the next worker's life. Only
    a sequence that was alone in the batch is convicted. Guarded by the group's lock.
    """

    def __init__(self, streams: Iterable[Stream] = ()) -> None:
        suspects = [stream for stream in streams if is_suspect(stream)]
        self._suspects = deque(sorted(suspects, key=lambda stream: -stream.deaths))
        self._first = self._suspects[0] if suspects else None
        self.accused: Stream | None = None  # has been given to the worker and may still be to blame

    @property
    def is_over(self) -> bool:
        return not self._suspects and self.accused is None

    def next(self) -> Stream | None:
        """The suspect to be given to the worker now, if any."""
        if self.accused or not self._suspects:
            return None
        self.accused = self._suspects.popleft()
        return self.accused

    def drop(self, stream: Stream) -> None:
        """It has published a token, or has ended."""
        if stream is self.accused:
            self.accused = None
        elif stream in self._suspects:
            self._suspects.remove(stream)

    def convicts(self, stream: Stream) -> bool:
        """Whether a death of the worker now is the fault of this stream, which it had begun."""
        return stream is self.accused is self._first
