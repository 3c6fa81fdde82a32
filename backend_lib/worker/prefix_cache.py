"""The prefix cache: a radix tree over token ids whose nodes own the KV indices of what was computed before."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np


class Node:
    """An edge of the tree: `ids` int32 [n] and the KV index of each, int32 [n].

    `locks` counts the sequences that read this node or one below it; only an unlocked leaf may be evicted.
    """

    __slots__ = ("birth", "children", "ids", "indices", "last_used", "locks", "parent", "queued")

    def __init__(self, parent: Node | None, ids: np.ndarray, indices: np.ndarray, birth: int, last_used: int) -> None:
        self.parent = parent
        self.ids = ids
        self.indices = indices
        self.children: dict[int, Node] = {}
        self.birth = birth
        self.last_used = last_used
        self.locks = 0
        self.queued = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def evictable(self) -> bool:
        return not self.children and not self.locks and self.parent is not None


class Match(NamedTuple):
    """The deepest node of a prefix, and the KV indices of its tokens, int32 [n]."""

    node: Node
    indices: np.ndarray


class PrefixCache:
    """Token-granular. The clock counts steps, so ranks that plan the same steps evict the same nodes.

    Owned by the scheduler. Every index is owned once: by the free list, by a sequence, or by one node here.
    """

    def __init__(self) -> None:
        self._roots: dict[int, Node] = {}
        self._births = 0
        # Every evictable node once, by when it was used last as far as was known when it came here; others may be left.
        self._queue: list[tuple[int, int, Node]] = []
        self.num_tokens = 0
        self.num_locked = 0

    @property
    def num_evictable(self) -> int:
        return self.num_tokens - self.num_locked

    def match(self, ids: np.ndarray, *, adapter: int, now: int) -> Match:
        """The longest cached prefix of int32 `ids`. A node of which only a part matches is split there."""
        node, place, found = self._root(adapter), 0, []
        while place < len(ids) and (child := node.children.get(int(ids[place]))):
            shared = _common(child.ids, ids[place:])
            node = child if shared == len(child) else self._split(child, shared)
            node.last_used = now
            found.append(node.indices)
            place += shared
            if node is not child:
                break
        return Match(node, np.concatenate(found) if found else np.empty(0, dtype=np.int32))

    def insert(self, ids: np.ndarray, indices: np.ndarray, *, adapter: int, now: int) -> tuple[Node, np.ndarray]:
        """Give `indices`, the KV of `ids`, to the tree.

        Returns the node at the end of `ids`, and those of `indices` that the tree does not need, since it has other
        indices for the same tokens: they are the caller's to free.
        """
        match = self.match(ids, adapter=adapter, now=now)
        cached = len(match.indices)
        spare = indices[:cached][indices[:cached] != match.indices]
        if cached == len(ids):
            return match.node, spare
        leaf = self._new_node(match.node, ids[cached:].copy(), indices[cached:].copy(), now)
        match.node.children[int(leaf.ids[0])] = leaf
        self.num_tokens += len(leaf)
        self._enqueue(leaf)
        return leaf, spare

    def lock(self, node: Node) -> None:
        """Keep a node and all above it from eviction."""
        while node.parent is not None:
            if node.locks == 0:
                self.num_locked += len(node)
            node.locks += 1
            node = node.parent

    def unlock(self, node: Node) -> None:
        leaf = node
        while node.parent is not None:
            node.locks -= 1
            if node.locks == 0:
                self.num_locked -= len(node)
            node = node.parent
        self._enqueue(leaf)

    def unlocked_above(self, node: Node) -> int:
        """Tokens of a node and those above it that nobody has locked: locking the node takes them from eviction."""
        count = 0
        while node.parent is not None and node.locks == 0:
            count += len(node)
            node = node.parent
        return count

    def locked_alone(self, node: Node | None) -> int:
        """Tokens of a node and those above it that one lock keeps: unlocking the node lets them be evicted."""
        count = 0
        while node is not None and node.parent is not None and node.locks == 1:
            count += len(node)
            node = node.parent
        return count

    def evict(self, num_tokens: int) -> np.ndarray:
        """Drop least recently used leaves until `num_tokens` are freed or nothing unlocked is left; their indices."""
        freed, count = [np.empty(0, dtype=np.int32)], 0
        while count < num_tokens and (leaf := self._next_leaf()):
            freed.append(leaf.indices)
            count += len(leaf)
            self._drop(leaf)
        return np.concatenate(freed)

    def clear(self) -> np.ndarray:
        """Drop everything that no sequence reads; the freed indices."""
        return self.evict(self.num_tokens)

    def _root(self, adapter: int) -> Node:
        if adapter not in self._roots:
            empty = np.empty(0, dtype=np.int32)
            self._roots[adapter] = Node(None, empty, empty, birth=-1, last_used=0)
        return self._roots[adapter]

    def _new_node(self, parent: Node, ids: np.ndarray, indices: np.ndarray, now: int) -> Node:
        self._births += 1
        return Node(parent, ids, indices, self._births, now)

    def _split(self, node: Node, at: int) -> Node:
        """Put a node with the first `at` tokens above `node`, which keeps the rest; returns the upper one."""
        assert node.parent is not None
        upper = self._new_node(node.parent, node.ids[:at], node.indices[:at], node.last_used)
        upper.locks = node.locks
        upper.children[int(node.ids[at])] = node
        node.parent.children[int(node.ids[0])] = upper
        node.parent, node.ids, node.indices = upper, node.ids[at:], node.indices[at:]
        return upper

    def _enqueue(self, node: Node) -> None:
        if node.evictable and not node.queued:
            node.queued = True
            heapq.heappush(self._queue, (node.last_used, node.birth, node))

    def _next_leaf(self) -> Node | None:
        """Take the least recently used evictable node from the queue. One that was used since goes back in."""
        while self._queue:
            last_used, _, node = heapq.heappop(self._queue)
            node.queued = False
            if node.evictable and node.last_used == last_used:
                return node
            self._enqueue(node)
        return None

    def _drop(self, leaf: Node) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[int(leaf.ids[0])]
        self.num_tokens -= len(leaf)
        self._enqueue(leaf.parent)


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common beginning of two int32 arrays."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length
