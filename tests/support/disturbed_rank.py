"""A rank that begins with another state than it should: the first KV index is taken by nobody."""

from __future__ import annotations

from backend_lib.worker import __main__ as worker
from backend_lib.worker import kv_cache


class Disturbed(kv_cache.KvCache):
    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self._num_free -= 1


if __name__ == "__main__":
    from backend_lib.worker import kv_memory

    kv_memory.KvCache = Disturbed  # type: ignore[misc]
    worker.main()
