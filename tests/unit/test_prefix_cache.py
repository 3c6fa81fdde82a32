"""The prefix cache against a dictionary of prefixes, over random lives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend_lib.worker.prefix_cache import Match, Node, PrefixCache

IDS = st.lists(st.integers(0, 2), max_size=9)
ADAPTERS = st.integers(0, 1)


def array(values) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def nodes_of(cache: PrefixCache) -> list[tuple[tuple[int, ...], Node]]:
    """Every node with the path that leads to its end, the adapter before it."""
    pending = [((adapter,), root) for adapter, root in cache._roots.items()]
    found = []
    while pending:
        path, node = pending.pop()
        for first, child in node.children.items():
            assert child.parent is node and len(child) and int(child.ids[0]) == first
            assert len(child.ids) == len(child.indices)
            pending.append(((*path, *child.ids.tolist()), child))
        if node.parent is not None:
            found.append((path, node))
    return found


def eviction_order(cache: PrefixCache, num_tokens: int) -> list[int]:
    """Indices that an eviction must give, in order: the least recently used unlocked leaf, again and again."""
    children = {node: len(node.children) for _, node in nodes_of(cache)}
    indices: list[int] = []
    while len(indices) < num_tokens:
        leaves = [node for node, count in children.items() if not count and not node.locks]
        if not leaves:
            break
        leaf = min(leaves, key=lambda node: (node.last_used, node.birth))
        indices += leaf.indices.tolist()
        del children[leaf]
        if leaf.parent in children:
            children[leaf.parent] -= 1
    return indices


class PrefixCacheMachine(RuleBasedStateMachine):
    """The model: each cached prefix, the adapter before it → the index of its last token, and when it was used."""

    @initialize()
    def begin(self) -> None:
        self.cache = PrefixCache()
        self.index: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.locked: list[tuple[Node, tuple[int, ...]]] = []
        self.now = self.num_indices = 0

    def _cached(self, adapter: int, ids: list[int]) -> int:
        """Length of the longest cached prefix."""
        return max(n for n in range(len(ids) + 1) if n == 0 or (adapter, *ids[:n]) in self.index)

    def _touch(self, adapter: int, ids: list[int]) -> None:
        self.used |= {(adapter, *ids[:n]): self.now for n in range(1, len(ids) + 1)}

    def _expected(self, adapter: int, ids: list[int]) -> list[int]:
        return [self.index[(adapter, *ids[: n + 1])] for n in range(len(ids))]

    @rule()
    def time_passes(self) -> None:
        self.now += 1

    @rule(adapter=ADAPTERS, ids=IDS, lock=st.booleans())
    def match(self, adapter: int, ids: list[int], lock: bool) -> None:
        match = self.cache.match(array(ids), adapter=adapter, now=self.now)
        prefix = ids[: self._cached(adapter, ids)]
        self._touch(adapter, prefix)
        assert match.indices.dtype == np.int32 and match.indices.tolist() == self._expected(adapter, prefix)
        unlocked = [
            n for n in range(1, len(prefix) + 1)
            if not any(path[: n + 1] == (adapter, *prefix[:n]) for _, path in self.locked)
        ]  # fmt: skip
        assert self.cache.unlocked_above(match.node) == len(unlocked)
        if lock:
            self._lock(match.node, (adapter, *prefix))

    def _lock(self, node: Node, path: tuple[int, ...]) -> None:
        self.cache.lock(node)
        self.locked.append((node, path))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data) -> None:
        node, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        self.cache.unlock(node)

    @rule(adapter=ADAPTERS, ids=IDS, own=st.integers(0, 9), lock=st.booleans())
    def insert(self, adapter: int, ids: list[int], own: int, lock: bool) -> None:
        """The last `own` of the cached tokens were computed by the caller too."""
        cached = self._cached(adapter, ids)
        read = max(cached - own, 0)
        fresh = list(range(self.num_indices, self.num_indices + len(ids) - read))
        self.num_indices += len(fresh)
        indices = self._expected(adapter, ids[:read]) + fresh
        given = array(indices)
        node, spare = self.cache.insert(array(ids), given, adapter=adapter, now=self.now)
        given[:] = -1  # the tree has its own copy
        assert spare.tolist() == fresh[: cached - read]
        for n in range(cached, len(ids)):
            self.index[(adapter, *ids[: n + 1])] = indices[n]
        self._touch(adapter, ids)
        assert any(node is each and path == (adapter, *ids) for path, each in self._nodes()) == bool(ids)
        if lock:
            self._lock(node, (adapter, *ids))

    @rule(num_tokens=st.integers(0, 30))
    def evict(self, num_tokens: int) -> None:
        expected = eviction_order(self.cache, num_tokens)
        assert len(expected) >= min(num_tokens, self.cache.num_evictable)
        self._gone(self.cache.evict(num_tokens), expected)

    @rule()
    def clear(self) -> None:
        expected = eviction_order(self.cache, self.cache.num_evictable)
        self._gone(self.cache.clear(), expected)
        assert self.cache.num_tokens == self.cache.num_locked

    def _gone(self, indices: np.ndarray, expected: list[int]) -> None:
        assert indices.dtype == np.int32 and indices.tolist() == expected
        gone = {path for path, index in self.index.items() if index in set(expected)}
        assert len(gone) == len(expected)
        for path in gone:
            assert not any(locked[: len(path)] == path for _, locked in self.locked)
            del self.index[path], self.used[path]

    def _nodes(self) -> list[tuple[tuple[int, ...], Node]]:
        return nodes_of(self.cache)

    @invariant()
    def the_tree_holds_what_the_dictionary_holds(self) -> None:
        if not hasattr(self, "cache"):
            return
        found = {}
        for path, node in self._nodes():
            ends = range(len(path) - len(node) + 1, len(path) + 1)
            found |= dict(zip((path[:end] for end in ends), node.indices.tolist(), strict=True))
            assert {self.used[path[:end]] for end in ends} == {node.last_used}
            assert node.locks == sum(locked[: len(path)] == path for _, locked in self.locked)
        assert found == self.index
        assert len(set(found.values())) == len(found)

    @invariant()
    def the_counts_are_a_recount(self) -> None:
        if not hasattr(self, "cache"):
            return
        locked = sum(len(node) for _, node in self._nodes() if node.locks)
        assert self.cache.num_tokens == len(self.index)
        assert self.cache.num_locked == locked
        assert self.cache.num_evictable == len(self.index) - locked

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for node, _ in self.locked:
            self.cache.unlock(node)
        assert sorted(self.cache.clear().tolist()) == sorted(self.index.values())
        assert (self.cache.num_tokens, self.cache.num_locked) == (0, 0) and not self._nodes()


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache()


def insert(cache: PrefixCache, ids: list[int], first: int, now: int = 0) -> Node:
    """`ids` with the indices from `first` on."""
    return cache.insert(array(ids), np.arange(first, first + len(ids), dtype=np.int32), adapter=0, now=now)[0]


def match(cache: PrefixCache, ids: list[int], now: int = 0) -> Match:
    return cache.match(array(ids), adapter=0, now=now)


def test_nothing_is_the_prefix_of_nothing(cache) -> None:
    node = insert(cache, [], 0)
    found = match(cache, [])
    assert found.node is node and not len(found.indices) and cache.num_tokens == 0
    cache.lock(node)  # what reads nothing locks nothing
    assert (cache.num_locked, cache.unlocked_above(node), len(cache.evict(5))) == (0, 0, 0)
    cache.unlock(node)


def test_a_single_token(cache) -> None:
    insert(cache, [7], 3)
    assert match(cache, [7, 8]).indices.tolist() == [3] and not len(match(cache, [8]).indices)
    assert cache.evict(1).tolist() == [3] and not len(match(cache, [7]).indices)


def test_a_prefix_of_a_node_splits_it_and_gives_back_what_is_twice(cache) -> None:
    leaf = insert(cache, [1, 2, 3, 4], 10)
    upper, spare = cache.insert(array([1, 2]), array([20, 21]), adapter=0, now=0)
    assert spare.tolist() == [20, 21] and leaf.parent is upper
    assert (upper.indices.tolist(), leaf.indices.tolist()) == ([10, 11], [12, 13])
    assert match(cache, [1, 2, 3, 4]).indices.tolist() == [10, 11, 12, 13]


def test_only_what_differs_is_given_back(cache) -> None:
    insert(cache, [1, 2, 3], 10)
    node, spare = cache.insert(array([1, 2, 3, 4]), array([10, 11, 22, 23]), adapter=0, now=0)
    assert spare.tolist() == [22] and node.indices.tolist() == [23]


def test_a_locked_node_is_extended_and_split_and_stays_locked(cache) -> None:
    node = insert(cache, [1, 2, 3], 10)
    cache.lock(node)
    longer = insert(cache, [1, 2, 3, 4], 10)
    assert longer.locks == 0 and cache.evict(9).tolist() == [13]
    upper = match(cache, [1, 2]).node
    assert (upper.locks, node.locks, cache.num_locked) == (1, 1, 3)
    cache.unlock(node)
    assert (upper.locks, node.locks, cache.num_locked) == (0, 0, 0)


def test_a_locked_leaf_keeps_what_is_above_it_but_not_its_sibling(cache) -> None:
    kept, other = insert(cache, [1, 2, 3], 10), insert(cache, [1, 2, 4], 10)
    cache.lock(kept)
    assert cache.unlocked_above(other) == 1  # all above it is locked already
    assert len(cache.evict(9)) == 1 and match(cache, [1, 2, 3]).indices.tolist() == [10, 11, 12]


def test_the_least_recently_used_goes_first_and_of_equals_the_first_born(cache) -> None:
    for token, now in ((1, 5), (2, 3), (3, 3), (4, 1)):
        insert(cache, [token], token, now)
    match(cache, [4], now=4)
    assert [cache.evict(1).tolist() for _ in range(4)] == [[2], [3], [4], [1]]


def test_a_parent_goes_after_its_last_child_and_never_before(cache) -> None:
    insert(cache, [1], 10, now=0)
    insert(cache, [1, 2], 10, now=9)
    insert(cache, [3], 30, now=5)
    assert cache.evict(3).tolist() == [30, 11, 10]


def test_what_was_locked_and_used_again_is_evicted_by_its_last_use(cache) -> None:
    first = insert(cache, [1], 10, now=0)
    insert(cache, [2], 20, now=1)
    cache.lock(first)
    assert cache.evict(1).tolist() == [20]
    insert(cache, [3], 30, now=2)
    cache.unlock(first)
    match(cache, [1], now=3)
    assert [cache.evict(1).tolist() for _ in range(2)] == [[30], [10]]


def test_adapters_share_nothing(cache) -> None:
    cache.insert(array([1, 2]), array([5, 6]), adapter=1, now=0)
    assert not len(match(cache, [1, 2]).indices)
    assert cache.match(array([1, 2]), adapter=1, now=0).indices.tolist() == [5, 6]
