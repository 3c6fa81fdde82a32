"""A doorbell between two processes: an eventfd. Rung any number of times before it is heard, it is heard once."""

from __future__ import annotations

import os
import select


class Doorbell:
    """`ring` after publishing; `wait`, then look at what was published. In that order no wake-up is lost.

    The descriptor is blocking and inherited by number; EFD_CLOEXEC keeps it from processes it was not passed to.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC) if fd is None else fd
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def ring(self) -> None:
        os.eventfd_write(self.fd, 1)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until rung, at most `timeout` seconds; whether it was rung. One waiter.

        A `timeout` below 0, from a deadline that has passed, does not block; poll by itself would block for ever.
        """
        if timeout is not None and not self._poll.poll(max(timeout, 0) * 1000):
            return False
        os.eventfd_read(self.fd)
        return True

    def close(self) -> None:
        os.close(self.fd)
