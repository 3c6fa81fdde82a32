"""Clients for tests below Triton: they keep what they are sent and notice what a sender must not do."""

from __future__ import annotations

import threading
from collections.abc import Callable

from backend_lib.request import FinishReason
from backend_lib.router.reply import ErrorKind, Reply


class ListSender:
    """Keeps every reply. A second final response, or any response after it, is kept in `faults`.

    `on_send` runs inside each send, for tests that need a slow or a failing client.
    """

    def __init__(self, on_send: Callable[[Reply], None] = lambda reply: None) -> None:
        self.replies: list[Reply] = []
        self.sibling_replies: list[tuple[list[Reply], list[int]]] = []
        self.error: tuple[ErrorKind, str] | None = None
        self.faults: list[str] = []
        self.cancelled = False
        self.asked = 0
        self.done = threading.Event()
        self._on_send = on_send
        self._busy = threading.Lock()

    def send(self, reply: Reply) -> None:
        self._enter(f"send {reply}")
        try:
            self._on_send(reply)
            self.replies.append(reply)
        finally:
            self._busy.release()
        if reply.finish:
            self.done.set()

    def send_siblings(self, replies: list[Reply], news: list[int], *, final: bool) -> None:
        self._enter(f"send {replies}")
        self.sibling_replies.append((replies, news))
        self._busy.release()
        if final:
            self.done.set()

    def fail(self, kind: ErrorKind, message: str) -> None:
        self._enter(f"fail {kind} {message}")
        self.error = (kind, message)
        self._busy.release()
        self.done.set()

    def is_cancelled(self) -> bool:
        self.asked += 1
        return self.cancelled

    def _enter(self, what: str) -> None:
        if self.done.is_set():
            self.faults.append(f"{what} after the last response")
        if not self._busy.acquire(blocking=False):
            self.faults.append(f"{what} while another send is under way")
            self._busy.acquire()

    @property
    def text(self) -> str:
        return "".join(reply.text for reply in self.replies)

    @property
    def num_tokens(self) -> int:
        return sum(reply.num_tokens for reply in self.replies)

    @property
    def finish(self) -> FinishReason:
        """The reason in the last response; NONE while there is none, or when it was an error."""
        return self.replies[-1].finish if self.replies else FinishReason.NONE

    def wait(self, timeout: float = 30.0) -> ListSender:
        """Wait for the last response; it must be the only one."""
        assert self.done.wait(timeout), f"no last response within {timeout} s: {self.replies[-3:]}"
        assert not self.faults, self.faults
        return self
