"""Requests that wait to be parsed and tokenised."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from backend_lib.arena import SlotRef
from backend_lib.router.intake import Inbound

THREADS = 2
LONG_BYTES = 64 << 10
MAX_BYTES = 256 << 20


class IntakeQueue:
    """Runs `work(inbound, leader)` in threads of its own.

    Requests of more than LONG_BYTES have one thread of their own, so that short ones never wait for them.
    """

    def __init__(self, work: Callable[[Inbound, SlotRef], None]) -> None:
        self._work = work
        self._short = ThreadPoolExecutor(THREADS, thread_name_prefix="tandem-intake")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tandem-intake-long")
        self._lock = threading.Lock()
        self._num_bytes = 0  # of requests that have been put and not been worked on

    def put(self, inbound: Inbound, leader: SlotRef) -> bool:
        """Take a request; False when more than MAX_BYTES would wait."""
        num_bytes = inbound.num_bytes
        with self._lock:
            if self._num_bytes + num_bytes > MAX_BYTES:
                return False
            self._num_bytes += num_bytes
        threads = self._long if num_bytes > LONG_BYTES else self._short
        threads.submit(self._run, inbound, leader, num_bytes)
        return True

    def close(self) -> None:
        """Return when everything has been worked on."""
        self._short.shutdown()
        self._long.shutdown()

    def _run(self, inbound: Inbound, leader: SlotRef, num_bytes: int) -> None:
        try:
            self._work(inbound, leader)
        finally:
            with self._lock:
                self._num_bytes -= num_bytes
