"""What a worker says of itself. The worker writes, anybody reads, nobody asks."""

from __future__ import annotations

import mmap
import time
from enum import IntEnum
from typing import NamedTuple

from backend_lib.arena.layout import ERROR_BYTES, STATUS_BYTES, ArenaSpec


class WorkerState(IntEnum):
    STARTING = 0
    LOADING = 1
    READY = 2
    FAILED = 3


# Exit status of a worker that ends because another rank of its group has ended.
LOST_GROUP = 3


class Load(NamedTuple):
    """Gauges of a running worker, and counts since it came up.

    `kv_used` includes what in-flight steps still hold. `recomputed`: tokens computed once more after a pause.
    """

    step: int
    running: int
    waiting: int
    paused: int
    kv_used: int
    cached: int
    pauses: int
    recomputed: int


_STATE, _TIME, _KV_TOKENS, _ERROR_LEN, _PREDICTED_STEP, _PORT = range(6)
_LOAD = 6  # first of the gauges' words
_ERROR_AT = STATUS_BYTES - ERROR_BYTES


class StatusBlock:
    def __init__(self, memory: mmap.mmap, words: memoryview, spec: ArenaSpec, group: int, rank: int) -> None:
        base = spec.group_offset(group) + spec.group.status + rank * STATUS_BYTES
        self._memory = memory
        self._words = words[base // 8 : (base + STATUS_BYTES) // 8]
        self._error_at = base + _ERROR_AT

    @property
    def state(self) -> WorkerState:
        return WorkerState(self._words[_STATE])

    @property
    def heartbeat_ns(self) -> int:
        """`time.monotonic_ns()` when the worker last wrote its load."""
        return self._words[_TIME]

    @property
    def kv_tokens(self) -> int:
        """Tokens the KV cache holds; 0 until a worker has been READY for the first time."""
        return self._words[_KV_TOKENS]

    @property
    def predicted_step(self) -> float:
        """Seconds that a full step is expected to take, measured while the worker warmed up."""
        return self._words[_PREDICTED_STEP] / 1e9

    @property
    def port(self) -> int:
        """Of rank 0: where the ranks of its group find each other, on the loopback; 0 until it listens."""
        return self._words[_PORT]

    def set_port(self, port: int) -> None:
        self._words[_PORT] = port

    @property
    def load(self) -> Load:
        return Load(*self._words[_LOAD : _LOAD + len(Load._fields)])

    @property
    def error(self) -> str:
        text = self._memory[self._error_at : self._error_at + self._words[_ERROR_LEN]]
        return text.decode(errors="ignore")  # the cut may have halved the last character

    def reset(self) -> None:
        """Back to STARTING for a new worker. The router calls this while no worker is attached.

        `kv_tokens` stays: requests have been admitted by it, so the next worker must hold as many.
        """
        for word in range(_LOAD + len(Load._fields)):
            if word != _KV_TOKENS:
                self._words[word] = 0

    def set_loading(self) -> None:
        self._words[_STATE] = WorkerState.LOADING

    def set_ready(self, kv_tokens: int, predicted_step: float = 0.0) -> None:
        self._words[_KV_TOKENS] = kv_tokens
        self._words[_PREDICTED_STEP] = int(predicted_step * 1e9)
        self._words[_STATE] = WorkerState.READY

    def set_failed(self, error: str) -> None:
        """Say why the worker cannot go on; the text is cut to what fits."""
        text = error.encode(errors="replace")[:ERROR_BYTES]  # a file name in it may hold surrogates
        self._memory[self._error_at : self._error_at + len(text)] = text
        self._words[_ERROR_LEN] = len(text)
        self._words[_STATE] = WorkerState.FAILED

    def set_load(self, load: Load) -> None:
        for word, value in enumerate(load, start=_LOAD):
            self._words[word] = value
        self._words[_TIME] = time.monotonic_ns()
