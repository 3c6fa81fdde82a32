"""Which slots a group touched: rank 0 appends, the router drains.

The writer never waits. When the router falls so far behind that entries were overwritten, it is told so and looks at
every slot of the group instead.
"""

from __future__ import annotations

from typing import NamedTuple

from backend_lib.arena.layout import LINE


class SlotRef(NamedTuple):
    slot: int
    generation: int


class DirtyList:
    """`num_records` entries of two words, slot and generation. Words: head (published), reserved (about to be
    overwritten), entries."""

    def __init__(self, words: memoryview, *, base: int, num_records: int) -> None:
        self._words = words
        self._head = base // 8
        self._reserved = (base + LINE) // 8
        self._entries = (base + 2 * LINE) // 8
        self._num_records = num_records
        self._tail = words[self._head]  # the reader's own place; nobody else needs it

    def append(self, refs: list[SlotRef]) -> None:
        """Publish the slots that one step touched. Only rank 0 calls this."""
        words, head = self._words, self._words[self._head]
        words[self._reserved] = head + len(refs)  # before the entries: a reader that copied them can tell
        for place, ref in enumerate(refs, start=head):
            at = self._entries + place % self._num_records * 2
            words[at], words[at + 1] = ref
        words[self._head] = head + len(refs)

    @property
    def head(self) -> int:
        """Entries appended so far."""
        return self._words[self._head]

    def drain(self) -> list[SlotRef] | None:
        """The slots touched since the last call, in order; None when some were lost. Only the router calls this."""
        words, start, head = self._words, self._tail, self._words[self._head]
        self._tail = head
        if head - start > self._num_records:
            return None
        entries = [self._entries + place % self._num_records * 2 for place in range(start, head)]
        refs = [SlotRef(words[at], words[at + 1]) for at in entries]
        if words[self._reserved] - start > self._num_records:
            return None  # the writer came round while they were copied
        return refs
