"""The one block of shared memory that the router and the workers of a node have in common."""

from __future__ import annotations

import json
import mmap
import os
import struct
from typing import Any

import numpy as np

from backend_lib.arena.decisions import DecisionRing, Digests
from backend_lib.arena.dirty import DirtyList
from backend_lib.arena.layout import CONFIG_OFFSET, HEADER_BYTES, LAYOUT_VERSION, MAGIC, SLOT, ArenaSpec
from backend_lib.arena.ring import CommandRing
from backend_lib.arena.slots import SlotTable
from backend_lib.arena.status import StatusBlock

_FIRST_WORDS = struct.Struct("9Q")  # magic, layout version, bytes of configuration, the spec


class ArenaMismatch(ValueError):
    """The block at the descriptor is not an arena that this build of Tandem can read."""


class Arena:
    """A mapped arena. The router makes it with `create`; workers map the same descriptor with `attach`.

    The block is a memfd: it has no name, so it cannot collide, be opened by a stranger, or outlive its last user.
    """

    def __init__(self, fd: int, spec: ArenaSpec) -> None:
        self.fd = fd
        self.spec = spec
        self.memory = mmap.mmap(fd, spec.total_bytes)
        self.words = memoryview(self.memory).cast("Q")
        self.slots = SlotTable(self._slot_headers(), self.memory, self.words, spec)

    @classmethod
    def create(cls, spec: ArenaSpec, config: dict[str, Any]) -> Arena:
        """Make a new arena that carries `config` as JSON. Raises ValueError when the JSON does not fit the header."""
        text = json.dumps(config).encode()
        if len(text) > HEADER_BYTES - CONFIG_OFFSET:
            raise ValueError(f"configuration takes {len(text)} bytes; at most {HEADER_BYTES - CONFIG_OFFSET} fit")
        fd = os.memfd_create("tandem-arena", os.MFD_CLOEXEC)
        os.ftruncate(fd, spec.total_bytes)
        arena = cls(fd, spec)
        arena.memory[CONFIG_OFFSET : CONFIG_OFFSET + len(text)] = text
        for index, word in enumerate((LAYOUT_VERSION, len(text), *spec), start=1):
            arena.words[index] = word
        arena.words[0] = MAGIC  # last: a reader that sees it sees the rest
        return arena

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Map an arena that another process made. Writes nothing. Raises ArenaMismatch when it is not one of ours."""
        words = _FIRST_WORDS.unpack(os.pread(fd, _FIRST_WORDS.size, 0).ljust(_FIRST_WORDS.size, b"\0"))
        if words[0] != MAGIC:
            raise ArenaMismatch(f"descriptor {fd} holds no Tandem arena")
        if words[1] != LAYOUT_VERSION:
            raise ArenaMismatch(f"arena has layout version {words[1]}; this build reads version {LAYOUT_VERSION}")
        groups, ranks, slots, ring, dirty, heap = words[3:]
        spec = ArenaSpec(
            num_groups=groups, num_ranks=ranks, num_slots=slots,
            ring_records=ring, dirty_records=dirty, heap_bytes=heap,
        )  # fmt: skip
        actual = os.fstat(fd).st_size
        if actual != spec.total_bytes:
            raise ArenaMismatch(f"arena holds {actual} bytes; its header describes {spec.total_bytes}")
        return cls(fd, spec)

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(self.memory[CONFIG_OFFSET : CONFIG_OFFSET + self.words[2]])

    def ring(self, group: int) -> CommandRing:
        layout, base = self.spec.group, self.spec.group_offset(group)
        return CommandRing(
            self.memory, self.words, head=base + layout.ring_head, cursors=base + layout.cursors,
            records=base + layout.records, num_records=self.spec.ring_records, num_ranks=self.spec.num_ranks,
        )  # fmt: skip

    def dirty_list(self, group: int) -> DirtyList:
        base = self.spec.group_offset(group) + self.spec.group.dirty
        return DirtyList(self.words, base=base, num_records=self.spec.dirty_records)

    def decisions(self, group: int) -> DecisionRing:
        base = self.spec.group_offset(group) + self.spec.group.decisions
        return DecisionRing(self.memory, self.words, base=base, num_ranks=self.spec.num_ranks)

    def digests(self, group: int) -> Digests:
        return Digests(self.words, base=self.spec.group_offset(group) + self.spec.group.digests)

    def status(self, group: int, rank: int) -> StatusBlock:
        return StatusBlock(self.memory, self.words, self.spec, group, rank)

    def epoch(self, group: int) -> int:
        return self.words[self.spec.group_offset(group) // 8]

    def set_epoch(self, group: int, epoch: int) -> None:
        """The router's word: a worker that was started for another epoch must leave."""
        self.words[self.spec.group_offset(group) // 8] = epoch

    def clear_group(self, group: int) -> None:
        """What its workers left unread is forgotten, and a new epoch begins. Only while no worker is attached to it."""
        self.ring(group).discard()
        self.decisions(group).discard()
        self.digests(group).discard(self.spec.num_ranks)
        for rank in range(self.spec.num_ranks):
            self.status(group, rank).reset()
        self.set_epoch(group, self.epoch(group) + 1)

    def _slot_headers(self) -> np.ndarray:
        return np.frombuffer(self.memory, dtype=SLOT, count=self.spec.num_slots, offset=self.spec.slots_offset)
