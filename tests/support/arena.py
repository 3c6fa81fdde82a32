"""What the arena's tests share: small arenas, a peer process, and a writer whose stores can be watched one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backend_lib.arena import Arena, ArenaSpec, Doorbell

ROOT = Path(__file__).parents[2]
SIZES = {"num_groups": 2, "num_ranks": 2, "num_slots": 4, "ring_records": 4, "dirty_records": 4, "heap_bytes": 4096}

Store = Callable[[], None]


def new_arena(config: dict[str, Any] | None = None, **sizes: int) -> Arena:
    return Arena.create(ArenaSpec(**{**SIZES, **sizes}), config or {})


def close(arena: Arena) -> None:
    """Tests make hundreds of arenas; a server makes one and keeps it."""
    os.close(arena.fd)


class WatchedStores:
    """Stands in for an arena's words or its bytes: every load is passed on, every store goes to `on_store`.

    A store of bytes is broken into single words, because a copy of many bytes is not one store for other processors.
    """

    def __init__(self, target: Any, on_store: Callable[[Store], None]) -> None:
        self._target = target
        self._on_store = on_store

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice) and isinstance(self._target, memoryview):
            return WatchedStores(self._target[at], self._on_store)
        return self._target[at]

    def __setitem__(self, at: int | slice, value: Any) -> None:
        if not isinstance(at, slice):
            self._on_store(lambda: self._target.__setitem__(at, value))
            return
        for begin in range(0, len(value), 8):
            part = value[begin : begin + 8]
            where = slice(at.start + begin, at.start + begin + len(part))
            self._on_store(lambda where=where, part=part: self._target.__setitem__(where, part))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._target)


class WatchedLoads:
    """Stands in for an arena's words or its bytes: `before_load` runs before each load."""

    def __init__(self, target: Any, before_load: Callable[[], None]) -> None:
        self._target = target
        self._before_load = before_load

    def __getitem__(self, at: int | slice) -> Any:
        self._before_load()
        return self._target[at]

    def __setitem__(self, at: int | slice, value: Any) -> None:
        self._target[at] = value


def watch_stores(part: Any, on_store: Callable[[Store], None]) -> None:
    """Make a ring, dirty list or status block hand its stores to `on_store`, which must call each."""
    for name in ("_words", "_memory"):
        if hasattr(part, name):
            setattr(part, name, WatchedStores(getattr(part, name), on_store))


def watch_loads(part: Any, before_load: Callable[[], None]) -> None:
    for name in ("_words", "_memory"):
        if hasattr(part, name):
            setattr(part, name, WatchedLoads(getattr(part, name), before_load))


@contextmanager
def peer(role: str, arena: Arena, *numbers: int, bells: tuple[Doorbell, ...]) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `role` of tests.support.arena_peer on the arena; it must have ended well by the end."""
    fds = [arena.fd, *(bell.fd for bell in bells)]
    command = [sys.executable, "-m", "tests.support.arena_peer", role, *map(str, (*fds, *numbers))]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=fds, stderr=subprocess.PIPE, text=True)
    try:
        yield process
        _, error = process.communicate(timeout=20)
        assert process.returncode == 0, error
    finally:
        process.kill()
        process.wait()
