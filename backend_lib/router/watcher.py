"""Looks for clients that have gone, deadlines that have passed, and the model's unloading."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from backend_lib.request import FinishReason
from backend_lib.router.reply import UNLOADING, ErrorKind, Verdict, verdict_of_client
from backend_lib.router.stream import Stream

log = logging.getLogger("tandem")

# Asking costs a round trip through Triton (about 0.1 ms), so a sweep takes its time when there are many to ask.
MIN_PERIOD = 0.04
PERIOD_PER_STREAM = 0.00025

SERVING_PERIOD = 0.5  # seconds between two looks at whether the model is still wanted
IDLE_PERIOD = 2.0  # the same while no stream is live


class Watcher:
    """Asks each live stream in turn and calls `on_verdict(stream)` for those that are over.

    Triton finalizes an unloaded model only when every response has been sent and every gRPC stream that has asked it is
    closed, and tells the model nothing until then. So the watcher asks `is_serving`, from the first stream on, and ends
    what still runs `drain_seconds` after the answer became no. When nothing runs then, it calls `on_drained()` once.
    """

    def __init__(
        self,
        on_verdict: Callable[[Stream], None],
        *,
        on_drained: Callable[[], None] = lambda: None,
        is_serving: Callable[[], bool],
        drain_seconds: float,
    ) -> None:
        self._on_verdict = on_verdict
        self._on_drained = on_drained
        self._is_serving = is_serving
        self._drain_seconds = drain_seconds
        self._asked = 0.0
        self._has_served = False
        self._drained_at = math.inf  # when the streams that are still live are ended
        self._streams: set[Stream] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tandem-watcher", daemon=True)
        self._thread.start()

    def add(self, stream: Stream) -> None:
        with self._changed:
            self._streams.add(stream)
            self._has_served = True
            self._changed.notify()

    def discard(self, stream: Stream) -> None:
        with self._changed:
            self._streams.discard(stream)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (streams := self._wait()) is not None:
            started = time.monotonic()
            self._look_at_model(started)
            for stream in streams:
                self._look_at(stream)
            if not streams and started > self._drained_at:
                self._on_drained()
                return
            period = max(MIN_PERIOD, len(streams) * PERIOD_PER_STREAM)
            time.sleep(max(0.0, period - (time.monotonic() - started)))

    def _wait(self) -> list[Stream] | None:
        """The live streams, once there are any or the model is to be looked at; None when closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._streams or self._closed, timeout=IDLE_PERIOD if self._has_served else None
            )
            return None if self._closed else list(self._streams)

    def _look_at_model(self, now: float) -> None:
        """A no is final: the next yes may be about another instance under the same name."""
        if now - self._asked < SERVING_PERIOD or self._drained_at < math.inf:
            return
        self._asked = now
        if not self._is_serving():
            self._drained_at = now + self._drain_seconds

    def _look_at(self, stream: Stream) -> None:
        """One stream's trouble stays its own: this thread also keeps everybody else's deadline."""
        if stream.answered:
            return
        try:
            verdict = self._verdict(stream)
        except Exception as error:  # from Triton
            words = f"the client cannot be asked whether it is still there: {error}"
            verdict = Verdict(FinishReason.ERROR, ErrorKind.INTERNAL, words)
        try:
            if verdict and stream.decide(verdict):
                self._on_verdict(stream)
        except Exception:
            log.exception("a stream that is over could not be ended")

    def _verdict(self, stream: Stream) -> Verdict | None:
        if time.monotonic() > self._drained_at:
            return UNLOADING
        return verdict_of_client(stream.request, stream.deadline, stream.sender)
