"""What rank 0 of a group tells the others before each step, and what each rank says it came to after it.

Decisions: one producer (rank 0), one cursor for each other rank. Rank 0 writes a record and then the head; a rank reads
the record after its cursor and then moves the cursor. A record is overwritten only when every rank has read it.
Digests: each rank writes its own and anybody compares.
"""

from __future__ import annotations

import mmap
import struct
import time
import zlib
from typing import NamedTuple

from backend_lib.arena.layout import DECISION_BYTES, DECISIONS, DIGEST_WORDS, DIGESTS, LINE

MAX_EVENTS = 20
_HEAD = struct.Struct("<QQQ")  # step, commands applied up to, number of events
_EVENT = struct.Struct("<QQQ")
_CRC_AT = DECISION_BYTES - 8


class Event(NamedTuple):
    """What only rank 0 can know of a sequence. `kind` is the reader's to name."""

    kind: int
    slot: int
    generation: int


class Decision(NamedTuple):
    """Number `step` of a group, counted from 1: apply all commands up to sequence `through`, then the events."""

    step: int
    through: int
    events: list[Event]

    def pack(self) -> bytes:
        """`DECISION_BYTES` bytes. Raises ValueError for more than `MAX_EVENTS` events."""
        if len(self.events) > MAX_EVENTS:
            raise ValueError(f"a decision has {len(self.events)} events; allowed are {MAX_EVENTS}")
        words = b"".join(
            [_HEAD.pack(self.step, self.through, len(self.events)), *(_EVENT.pack(*e) for e in self.events)]
        )
        padded = words.ljust(_CRC_AT, b"\0")
        return padded + struct.pack("<Q", zlib.crc32(padded))

    @classmethod
    def unpack(cls, record: bytes) -> Decision | None:
        """None when the record is not whole."""
        if struct.unpack_from("<Q", record, _CRC_AT)[0] != zlib.crc32(record[:_CRC_AT]):
            return None
        step, through, count = _HEAD.unpack_from(record)
        return cls(step, through, [Event(*_EVENT.unpack_from(record, _HEAD.size * (1 + n))) for n in range(count)])


class RankBehind(RuntimeError):
    """A rank has not read what was decided for so long that no more can be decided."""


class DecisionRing:
    def __init__(self, memory: mmap.mmap, words: memoryview, *, base: int, num_ranks: int) -> None:
        self._memory = memory
        self._words = words
        self._head = base // 8
        self._cursors = {rank: (base + LINE * (1 + rank)) // 8 for rank in range(1, num_ranks)}  # the others'
        self._records = base + LINE * (1 + num_ranks)

    def publish(self, decision: Decision, *, timeout: float) -> None:
        """The one that follows the newest. Only rank 0 calls this.

        Raises:
            RankBehind: no room within `timeout` seconds; names the rank.
        """
        assert decision.step == self._words[self._head] + 1
        self._wait_for_room(decision.step, timeout)
        at = self._at(decision.step)
        self._memory[at : at + DECISION_BYTES] = decision.pack()
        self._words[self._head] = decision.step

    def next(self, rank: int) -> Decision | None:
        """The one that `rank` has not read yet. None: it has not been decided, or is not wholly visible."""
        step = self._words[self._cursors[rank]] + 1
        if self._words[self._head] < step:
            return None
        at = self._at(step)
        decision = Decision.unpack(self._memory[at : at + DECISION_BYTES])
        if decision is None or decision.step != step:
            return None
        self._words[self._cursors[rank]] = step
        return decision

    def discard(self) -> None:
        """Begin again at 1. Only while no worker is attached to the group."""
        for word in (self._head, *self._cursors.values()):
            self._words[word] = 0

    def _at(self, step: int) -> int:
        return self._records + step % DECISIONS * DECISION_BYTES

    def _wait_for_room(self, step: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while step - (least := min(read := self._read())) > DECISIONS:
            if time.monotonic() > deadline:
                behind = 1 + read.index(least)
                raise RankBehind(f"rank {behind} is at step {least} of {step} and did not move for {timeout:g} s")
            time.sleep(0.0001)

    def _read(self) -> list[int]:
        """How far each rank but 0 has come."""
        return [self._words[word] for word in self._cursors.values()]


class Digests:
    """Per rank the digests of its last `DIGESTS` steps."""

    def __init__(self, words: memoryview, *, base: int) -> None:
        self._words = words
        self._base = base // 8

    def write(self, rank: int, step: int, values: tuple[int, ...]) -> None:
        """At most `DIGEST_WORDS - 1` words of 64 bits. `step` counts from 1."""
        at = self._at(rank, step)
        self._words[at] = 0  # a reader that is under way must not take the new for the old
        for place, value in enumerate(values, start=at + 1):
            self._words[place] = value
        self._words[at] = step

    def read(self, rank: int, step: int, count: int) -> tuple[int, ...] | None:
        """None when the rank has not written it, or has overwritten it since."""
        at = self._at(rank, step)
        values = tuple(self._words[at + 1 : at + 1 + count]) if self._words[at] == step else None
        return values if self._words[at] == step else None

    def has_passed(self, rank: int, step: int) -> bool:
        """Whether the rank has overwritten that step, so that it cannot be read any more."""
        return self._words[self._at(rank, step)] > step

    def discard(self, num_ranks: int) -> None:
        """Only while no worker is attached to the group."""
        for word in range(self._base, self._base + num_ranks * DIGESTS * DIGEST_WORDS):
            self._words[word] = 0

    def _at(self, rank: int, step: int) -> int:
        return self._base + (rank * DIGESTS + step % DIGESTS) * DIGEST_WORDS
