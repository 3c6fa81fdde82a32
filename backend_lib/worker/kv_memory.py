"""A group's KV memory: free indices, what sequences hold, and the prefix cache."""

from __future__ import annotations

import numpy as np

from backend_lib.worker.kv_cache import KvCache
from backend_lib.worker.prefix_cache import Match, PrefixCache
from backend_lib.worker.sequence import Sequence

# Leaves are looked for no more often than every so many tokens.
MIN_EVICTION = 64


class KvMemory:
    """Every index is in one place: free, held by one sequence, or in one node of the prefix cache.

    A sequence reads the leading positions of its row from the cache, whose node it keeps locked, and holds the
    rest itself until it is released; then the cache takes what it has not got.
    """

    def __init__(self, *, num_tokens: int, num_rows: int, max_len: int) -> None:
        self.num_tokens = num_tokens
        self.kv = KvCache(num_tokens=num_tokens, num_rows=num_rows, max_len=max_len)
        self.cache = PrefixCache()

    @property
    def available(self) -> int:
        """Indices that can be handed out now."""
        return self.kv.num_free + self.cache.num_evictable

    @property
    def num_used(self) -> int:
        """Indices that running sequences read or write."""
        return self.num_tokens - self.available

    @property
    def num_locked(self) -> int:
        """Indices in the prefix cache that sequences read."""
        return self.cache.num_locked

    def cached_for(self, sequence: Sequence, now: int) -> tuple[int, int]:
        """Tokens of a sequence that has not started which are cached, and those of them that could still be evicted."""
        match = self._match(sequence, now)
        return len(match.indices), self.cache.unlocked_above(match.node)

    def attach(self, sequence: Sequence, now: int) -> None:
        """Give a sequence that has its row the cached beginning; the last known token is always left to compute."""
        match = self._match(sequence, now)
        self.cache.lock(match.node)
        sequence.node = match.node
        sequence.cached_indices = match.indices
        sequence.num_computed = sequence.num_shared = len(match.indices)
        self.kv.table[sequence.row, : len(match.indices)] = match.indices

    def allocate(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """int64 [T] indices for the T places (rows[t], positions[t]), evicting as needed."""
        short = len(rows) - self.kv.num_free
        if short > 0:
            self.kv.give_back(self.cache.evict(max(short, MIN_EVICTION)))
        return self.kv.allocate(rows, positions)

    def share(self, sequence: Sequence, now: int) -> None:
        """Let others read a prompt as soon as the step that completes it is planned: they run after it.

        Not where another has shared the same tokens meanwhile: this sequence would keep them from eviction beside its
        own, and hold more than it was admitted for.
        """
        if not sequence.use_cache:
            return
        ids = sequence.known_ids(0, sequence.known_len)
        cached = self.cache.match(ids, adapter=sequence.adapter_id, now=now).indices
        if len(cached) == sequence.num_shared:
            self._insert(sequence, sequence.known_len, now)
            sequence.num_shared = sequence.known_len

    def release(self, sequence: Sequence, now: int) -> None:
        """Take everything back: no step in flight holds the sequence."""
        held = sequence.num_computed
        indices = self.kv.table[sequence.row, :held]
        # Whatever a step computed had been published before the step was over.
        assert held <= len(sequence.prompt_ids) + sequence.output_len
        if sequence.use_cache:
            indices = self._insert(sequence, held, now)
        self.kv.give_back(indices)
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
        sequence.node, sequence.num_shared = None, 0

    def held_by(self, sequence: Sequence) -> int:
        """Indices that can be handed out when a sequence has been released, whatever starts until then."""
        return sequence.num_computed - sequence.num_shared

    def returned_by(self, sequence: Sequence) -> int:
        """The same, when nothing starts until then that reads what it alone reads of the cache: at least so many, for
        what it shares with another that leaves is not counted."""
        return self.held_by(sequence) + self.cache.locked_alone(sequence.node)

    def _match(self, sequence: Sequence, now: int) -> Match:
        length = sequence.known_len - 1 if sequence.use_cache else 0
        return self.cache.match(sequence.known_ids(0, length), adapter=sequence.adapter_id, now=now)

    def _insert(self, sequence: Sequence, length: int, now: int) -> np.ndarray:
        """Hand the row's first `length` positions to the cache and lock them; indices that it did not need."""
        ids = sequence.known_ids(0, length)
        node, spare = self.cache.insert(ids, self.kv.table[sequence.row, :length], adapter=sequence.adapter_id, now=now)
        self.cache.lock(node)
        if sequence.node is not None:
            self.cache.unlock(sequence.node)
        sequence.node = node
        return spare
