"""Waiting for signals and for processes to end at the same time, without polling."""

from __future__ import annotations

import os
import select
import signal
from types import TracebackType
from typing import NamedTuple

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STDIN = 0


class Event(NamedTuple):
    """What ended a wait: a signal, a process that ended, or neither (the time was over)."""

    signal: int | None = None
    ended: int | None = None


class Watch:
    """While it is entered, SIGINT, SIGTERM and SIGHUP become events instead of ending this process.

    So does the hang-up of the terminal this process was started in the foreground of: the system tells only the
    session's leader, and make as that leader waits for its command instead of passing it on.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._pidfds: dict[int, int] = {}  # pid → pidfd
        self._signals, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Watch:
        self._previous = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        self._poll.register(self._signals, select.POLLIN)
        if _in_foreground():
            self._poll.register(_STDIN, 0)  # POLLHUP is reported unasked
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        for fd in (self._signals, self._waker, *self._pidfds.values()):
            os.close(fd)

    def add(self, pid: int) -> None:
        """Watch a process, once however often it is named; one that has ended already is not an error."""
        if pid in self._pidfds:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        self._pidfds[pid] = fd
        self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float) -> Event:
        """The first event within `seconds`; a process is reported once and then forgotten."""
        ready = [fd for fd, _ in self._poll.poll(max(0.0, seconds) * 1000)]
        if self._signals in ready:
            # One byte for each signal; a handler that does nothing may also write one for a signal that is not ours.
            numbers = [number for number in os.read(self._signals, 64) if number in _SIGNALS]
            return Event(signal=numbers[0]) if numbers else Event()
        if _STDIN in ready:
            self._poll.unregister(_STDIN)
            return Event(signal=signal.SIGHUP)
        ended = next((pid for pid, fd in self._pidfds.items() if fd in ready), None)
        if ended is not None:
            fd = self._pidfds.pop(ended)
            self._poll.unregister(fd)
            os.close(fd)
        return Event(ended=ended)


def _in_foreground() -> bool:
    """Whether standard input is this session's terminal and this process not a background job, which may outlive it."""
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:
        return False
