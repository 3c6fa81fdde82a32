"""Where everything lies in the arena.

    header · per group: epoch line, command ring, dirty list, decisions, digests and a status block per rank · slots ·
heap of extents

A word is one aligned unsigned 64-bit integer with exactly one writer. Words that publish something are stored after the
payload they publish; x86-64 keeps stores in order, so a reader that sees the word sees the payload.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

MAGIC = 0x314D45444E4154  # "TANDEM1" in little-endian bytes
LAYOUT_VERSION = 4

LINE = 64  # bytes of a cache line: words of different writers never share one
HEADER_BYTES = 1 << 16
CONFIG_OFFSET = 256
RECORD_BYTES = 64
DIRTY_BYTES = 16
DECISIONS = 64  # records of a group's decisions
DECISION_BYTES = 512
DIGESTS = 64  # steps of which a rank's digests are kept
DIGEST_WORDS = 8
STATUS_BYTES = 2048
ERROR_BYTES = 1024

# The router's half of a slot and the worker's lie on different cache lines.
SLOT = np.dtype(
    {
        "names": [
            *("generation", "client_finish", "admit_order", "seed", "arrival_ns", "temperature", "top_p"),
            *("params_offset", "prompt_offset", "output_offset", "logprob_offset"),
            *("params_bytes", "prompt_len", "max_tokens", "min_tokens", "logprob_width", "top_k", "priority"),
            *("group", "leader_slot", "sequence_index", "adapter_id", "ignore_eos", "prompt_logprob_width"),
            "prompt_logprob_offset",
            *("published", "cumulative_logprob", "first_scheduled_ns", "first_token_ns", "last_token_ns"),
            *("cached_tokens", "error"),
        ],
        "formats": [
            *(*(["u8"] * 5), "f8", "f8", *(["u8"] * 4), *(["u4"] * 6), "i4", *(["u4"] * 6), "u8"),
            *("u8", "f8", "u8", "u8", "u8", "u4", "S212"),
        ],
        "offsets": [*range(0, 88, 8), *range(88, 140, 4), 144, *range(256, 296, 8), 296, 300],
        "itemsize": 512,
    }
)
GENERATION_WORD, CLIENT_FINISH_WORD, PUBLISHED_WORD = 0, 1, 256 // 8  # words of a slot that are stored as such


def logprob_row(width: int) -> np.dtype:
    """One token's log-probabilities: its rank among all, from 1, and `width` tokens, itself and then the likeliest."""
    return np.dtype([("rank", "i4"), ("token_ids", "i4", (width,)), ("logprobs", "f4", (width,))])


def align(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE


@dataclass(frozen=True, kw_only=True)
class ArenaSpec:
    """The sizes that fix every offset. Written into the header and compared at attach."""

    num_groups: int
    num_ranks: int
    num_slots: int
    ring_records: int
    dirty_records: int
    heap_bytes: int

    def __iter__(self) -> Iterator[int]:
        return iter(
            (self.num_groups, self.num_ranks, self.num_slots, self.ring_records, self.dirty_records, self.heap_bytes)
        )

    @cached_property
    def group(self) -> GroupLayout:
        """Offsets inside a group's block, from the block's start."""
        cursors = LINE * 2
        records = cursors + LINE * self.num_ranks
        dirty = records + RECORD_BYTES * self.ring_records
        decisions = align(dirty + LINE * 2 + DIRTY_BYTES * self.dirty_records)
        digests = decisions + LINE * (1 + self.num_ranks) + DECISIONS * DECISION_BYTES
        status = digests + self.num_ranks * DIGESTS * DIGEST_WORDS * 8
        return GroupLayout(
            epoch=0, ring_head=LINE, cursors=cursors, records=records, dirty=dirty, decisions=decisions,
            digests=digests, status=status, num_bytes=status + STATUS_BYTES * self.num_ranks,
        )  # fmt: skip

    def group_offset(self, group: int) -> int:
        return HEADER_BYTES + group * self.group.num_bytes

    @cached_property
    def slots_offset(self) -> int:
        return self.group_offset(self.num_groups)

    @cached_property
    def heap_offset(self) -> int:
        return self.slots_offset + SLOT.itemsize * self.num_slots

    @cached_property
    def total_bytes(self) -> int:
        return self.heap_offset + align(self.heap_bytes)


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    epoch: int
    ring_head: int
    cursors: int
    records: int
    dirty: int
    decisions: int
    digests: int
    status: int
    num_bytes: int
