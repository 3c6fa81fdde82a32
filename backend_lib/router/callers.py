"""Requests by the id that their clients gave them, so that another request may end them."""

from __future__ import annotations

import threading
from collections import defaultdict

from backend_lib.router.reply import Client, ErrorKind, Reply


class Callers:
    """Those who wait for answers to requests with an id. Several may have the same one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: defaultdict[str, set[_Caller]] = defaultdict(set)

    def enter(self, request_id: str, sender: Client) -> Client:
        """The sender to use in place of this one, until it has sent its last response."""
        caller = _Caller(self, request_id, sender)
        with self._lock:
            self._waiting[request_id].add(caller)
        return caller

    def cancel(self, request_id: str) -> None:
        """Every request of this id counts as called off by its client. There may be none."""
        with self._lock:
            for caller in self._waiting.get(request_id, ()):
                caller.cancelled = True

    def leave(self, caller: _Caller) -> None:
        with self._lock:
            waiting = self._waiting.get(caller.request_id, set())
            waiting.discard(caller)
            if not waiting:
                self._waiting.pop(caller.request_id, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._waiting)


class _Caller:
    """A `Client` that leaves with its last response, whether that could be sent or not."""

    def __init__(self, callers: Callers, request_id: str, sender: Client) -> None:
        self._callers = callers
        self._sender = sender
        self.request_id = request_id
        self.cancelled = False

    def send(self, reply: Reply) -> None:
        try:
            self._sender.send(reply)
        finally:
            if reply.finish:
                self._callers.leave(self)

    def send_siblings(self, replies: list[Reply], news: list[int], *, final: bool) -> None:
        try:
            self._sender.send_siblings(replies, news, final=final)
        finally:
            if final:
                self._callers.leave(self)

    def fail(self, kind: ErrorKind, message: str) -> None:
        try:
            self._sender.fail(kind, message)
        finally:
            self._callers.leave(self)

    def is_cancelled(self) -> bool:
        return self.cancelled or self._sender.is_cancelled()
