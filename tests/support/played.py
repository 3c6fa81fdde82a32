"""A group of real worker processes, with the test in the router's place: it posts commands and reads what comes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from backend_lib.arena import Arena, ArenaSpec, CommandKind, Doorbell, Published, SlotRef, WorkerState
from backend_lib.config import Settings
from benchmarks.slots import request_bytes, write_request

ROOM = 512  # bytes for a request's parameters
ROOT = Path(__file__).parents[2]


class PlayedGroup:
    """All ranks of a group on an arena of their own."""

    def __init__(
        self, model: str, *, num_slots: int, max_len: int, max_tokens: int, record_bytes: int = 0, **settings: Any
    ) -> None:
        """`record_bytes`: of a slot, behind its tokens, for log-probabilities."""
        self.settings = Settings(model=model, threads=1, max_model_len=max_len, **settings)
        self.num_ranks = self.settings.tensor_parallel
        self.records_at = request_bytes(max_len, max_tokens, room=ROOM)
        self.slot_bytes = self.records_at + record_bytes
        spec = ArenaSpec(
            num_groups=1, num_ranks=self.num_ranks, num_slots=num_slots, ring_records=4096, dirty_records=1 << 16,
            heap_bytes=self.slot_bytes * num_slots,
        )  # fmt: skip
        self.arena = Arena.create(spec, {"settings": self.settings.as_dict(), "max_model_len": max_len})
        self.ring, self.dirty = self.arena.ring(0), self.arena.dirty_list(0)
        self.bells, self.replies = [Doorbell() for _ in range(self.num_ranks)], Doorbell()
        self.processes: list[subprocess.Popen] = []
        self._generation = 0

    def start(self, timeout: float = 60, modules: Mapping[int, str] = MappingProxyType({})) -> None:
        """`modules`: ranks that run another module than a worker's."""
        names = [modules.get(rank, "backend_lib.worker") for rank in range(self.num_ranks)]
        for rank, name in enumerate(names):
            self.start_one(rank, name)
        self.psutil_processes = [psutil.Process(process.pid) for process in self.processes]
        deadline = time.monotonic() + timeout
        while any(self.arena.status(0, rank).state is not WorkerState.READY for rank in range(self.num_ranks)):
            self.assert_alive()
            assert time.monotonic() < deadline, "the ranks are not ready in time"
            time.sleep(0.01)

    def start_one(self, rank: int, module: str = "backend_lib.worker") -> subprocess.Popen:
        self.processes.append(self._process(rank, module))
        return self.processes[-1]

    def assert_alive(self) -> None:
        errors = [self.arena.status(0, rank).error for rank in range(self.num_ranks)]
        assert all(process.poll() is None for process in self.processes), errors

    def admit(self, slot: int, prompt: Iterable[int], max_tokens: int, **fields: Any) -> SlotRef:
        """A request in a slot that no rank knows. `fields`: of the slot's header, and `params`."""
        self._generation += 1
        at = slot * self.slot_bytes
        write_request(self.arena.slots, slot, self._generation, at, list(prompt), max_tokens, room=ROOM, **fields)
        ref = SlotRef(slot, self._generation)
        self.post(CommandKind.ADMIT, ref)
        return ref

    def post(self, kind: CommandKind, ref: SlotRef) -> int:
        sequence = self.ring.post(kind, *ref)
        self.bells[0].ring()
        return sequence

    def published(self, ref: SlotRef) -> Published | None:
        return self.arena.slots.published(*ref)

    def output(self, ref: SlotRef) -> list[int]:
        published = self.published(ref)
        return self.arena.slots.output_ids(ref.slot)[: published.output_len].tolist() if published else []

    def wait_released(self, refs: Iterable[SlotRef], timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        for ref in refs:
            while not ((published := self.published(ref)) and published.released):
                self.assert_alive()
                assert time.monotonic() < deadline, f"{ref} was not released in time"
                self.replies.wait(0.05)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _process(self, rank: int, module: str) -> subprocess.Popen:
        bells = [bell.fd for bell in self.bells]
        numbers = {
            "arena": self.arena.fd, "replies": self.replies.fd, "group": 0, "rank": rank,
            "epoch": self.arena.epoch(0), "parent": os.getpid(),
        }  # fmt: skip
        arguments = [f"--{name}={value}" for name, value in numbers.items()]
        arguments.append(f"--bells={','.join(map(str, bells))}")
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            pass_fds=[self.arena.fd, self.replies.fd, *bells], cwd=ROOT,
        )  # fmt: skip


@contextmanager
def played_group(model: str | Path, **how: Any) -> Iterator[PlayedGroup]:
    group = PlayedGroup(str(model), **how)
    try:
        group.start()
        yield group
    finally:
        group.close()
