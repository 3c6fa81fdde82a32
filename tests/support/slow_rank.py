"""A rank that reads each slot late: by then rank 0 may have published tokens of it."""

from __future__ import annotations

import time
from typing import Any

from backend_lib.worker import __main__ as worker
from backend_lib.worker import engine
from backend_lib.worker.sequence import Sequence


class SlowToRead(Sequence):
    @classmethod
    def from_slot(cls, *args: Any, **kwargs: Any) -> Sequence:
        time.sleep(0.05)
        return Sequence.from_slot(*args, **kwargs)


if __name__ == "__main__":
    engine.Sequence = SlowToRead  # type: ignore[misc]
    worker.main()
