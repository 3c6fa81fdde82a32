"""A group's command log: one producer (the router), one cursor per rank.

The producer writes a record and then the head; a rank reads up to the head and then moves its own cursor. A record is
overwritten only when every rank's cursor has passed it.
"""

from __future__ import annotations

import mmap
import struct
import time
import zlib
from enum import IntEnum
from typing import NamedTuple

from backend_lib.arena.layout import LINE, RECORD_BYTES

_PAYLOAD = struct.Struct("<IIQQ")  # command, slot, generation, argument
_CRC_AT = RECORD_BYTES - 8
_SEQUENCE_BYTES = 8
LEAD_SHARE = 4  # one of so many parts of a ring holds what rank 0 has applied and another rank has not


class CommandKind(IntEnum):
    ADMIT = 1
    ABORT = 2


class Command(NamedTuple):
    """`argument` of ADMIT: output tokens that an earlier worker has published."""

    sequence: int
    kind: CommandKind
    slot: int
    generation: int
    argument: int


class RingFull(RuntimeError):
    """A rank has not read for so long that the ring is full."""


class CommandRing:
    """`num_records` records of 64 bytes. Record of sequence n stands at n % num_records; sequences start at 1."""

    def __init__(
        self, memory: mmap.mmap, words: memoryview, *,
        head: int, cursors: int, records: int, num_records: int, num_ranks: int,
    ) -> None:  # fmt: skip
        self._memory = memory
        self._words = words
        self._head = head // 8
        self._cursors = [(cursors + rank * LINE) // 8 for rank in range(num_ranks)]
        self._records = records
        self._num_records = num_records

    @property
    def head(self) -> int:
        """Sequence of the newest published record; 0 when there is none."""
        return self._words[self._head]

    def cursor(self, rank: int) -> int:
        """Sequence of the last record that `rank` has applied."""
        return self._words[self._cursors[rank]]

    @property
    def cursors(self) -> tuple[int, ...]:
        """Each rank's."""
        return tuple(self._words[word] for word in self._cursors)

    @property
    def room_to_lead(self) -> int:
        """How many more records rank 0 may apply. Others may be behind it by a quarter of all: so there is as much room
        for what rank 0 has not applied as if it were alone, however late another rank is."""
        own, *others = self.cursors
        return self._num_records // LEAD_SHARE - (own - min(others)) if others else self._num_records

    def passed_by_all(self, sequence: int) -> bool:
        return min(self.cursors) >= sequence

    def post(self, kind: CommandKind, slot: int, generation: int, argument: int = 0, *, timeout: float = 5.0) -> int:
        """Publish one command and return its sequence. Only the producer calls this, one thread at a time.

        Raises:
            RingFull: no room within `timeout` seconds; names the rank that is behind.
        """
        sequence = self._words[self._head] + 1
        self._wait_for_room(sequence, timeout)
        at = self._records + (sequence % self._num_records) * RECORD_BYTES
        payload = _PAYLOAD.pack(kind, slot, generation, argument)
        self._words[at // 8] = sequence
        self._memory[at + _SEQUENCE_BYTES : at + _SEQUENCE_BYTES + len(payload)] = payload
        self._words[(at + _CRC_AT) // 8] = _crc(sequence, payload)
        self._words[self._head] = sequence
        return sequence

    def read(self, rank: int) -> list[Command]:
        """All commands that `rank` has not applied. Its cursor stays: see `advance`."""
        commands = []
        for sequence in range(self.cursor(rank) + 1, self.head + 1):
            command = self._read_one(sequence)
            if command is None:
                break  # not fully visible yet; the next read sees it
            commands.append(command)
        return commands

    def advance(self, rank: int, sequence: int) -> None:
        """Tell the producer that `rank` has applied everything up to `sequence`. Only that rank calls this."""
        self._words[self._cursors[rank]] = sequence

    def discard(self) -> None:
        """Forget every unread record. Only while no worker is attached to the group."""
        for word in self._cursors:
            self._words[word] = self._words[self._head]

    def _read_one(self, sequence: int) -> Command | None:
        at = self._records + (sequence % self._num_records) * RECORD_BYTES
        before = self._words[at // 8]
        payload = self._memory[at + _SEQUENCE_BYTES : at + _SEQUENCE_BYTES + _PAYLOAD.size]
        crc = self._words[(at + _CRC_AT) // 8]
        after = self._words[at // 8]
        if not before == after == sequence or crc != _crc(sequence, payload):
            return None
        kind, slot, generation, argument = _PAYLOAD.unpack(payload)
        return Command(sequence, CommandKind(kind), slot, generation, argument)

    def _wait_for_room(self, sequence: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while sequence - min(self.cursors) > self._num_records:
            if time.monotonic() > deadline:
                behind = min(range(len(self._cursors)), key=self.cursor)
                raise RingFull(
                    f"command ring is full: rank {behind} has read up to {self.cursor(behind)} of {sequence - 1} "
                    f"and did not move for {timeout:g} s"
                )
            time.sleep(0.001)


def _crc(sequence: int, payload: bytes) -> int:
    return zlib.crc32(payload, sequence & 0xFFFFFFFF)
