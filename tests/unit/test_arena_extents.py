"""The extent allocator against a set of taken bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from backend_lib.arena import ExtentAllocator
from backend_lib.arena.layout import LINE, align

HEAP_LINES = 16


def test_an_extent_is_never_empty():
    allocator = ExtentAllocator(2 * LINE)
    assert (allocator.allocate(0), allocator.allocate(1), allocator.allocate(0)) == (0, LINE, None)


def test_a_heap_that_ends_inside_a_line_stays_inside():
    allocator = ExtentAllocator(2 * LINE - 1)
    assert allocator.allocate(1) == 0
    assert allocator.allocate(1) is None


def test_freeing_what_was_not_taken_is_a_fault():
    allocator = ExtentAllocator(4 * LINE)
    allocator.free(allocator.allocate(LINE))
    with pytest.raises(KeyError):
        allocator.free(0)


class ExtentsAgainstLines(RuleBasedStateMachine):
    """The model is one flag a line of the heap. The allocator must take the lowest run of free lines that is enough."""

    @initialize()
    def start(self) -> None:
        self.allocator = ExtentAllocator(HEAP_LINES * LINE)
        self.taken: dict[int, int] = {}  # offset -> bytes

    def lines_in_use(self) -> set[int]:
        return {line for offset, size in self.taken.items() for line in range(offset // LINE, (offset + size) // LINE)}

    def lowest_fit(self, size: int) -> int | None:
        used, need = self.lines_in_use(), size // LINE
        firsts = range(HEAP_LINES - need + 1)
        return next((first * LINE for first in firsts if used.isdisjoint(range(first, first + need))), None)

    @rule(num_bytes=st.one_of(st.integers(0, 5 * LINE), st.integers(1, 5).map(LINE.__mul__)))
    def allocate(self, num_bytes: int) -> None:
        size = max(align(num_bytes), LINE)
        expected = self.lowest_fit(size)
        offset = self.allocator.allocate(num_bytes)
        assert offset == expected
        if offset is not None:
            assert offset not in self.taken
            self.taken[offset] = size

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.taken)))
        del self.taken[offset]
        self.allocator.free(offset)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def free_all(self, data: st.DataObject) -> None:
        """In any order: one hole is left, and it is the heap."""
        for offset in data.draw(st.permutations(sorted(self.taken))):
            self.allocator.free(offset)
        self.taken = {}
        assert self.allocator.allocate(HEAP_LINES * LINE) == 0
        self.allocator.free(0)

    @invariant()
    def taken_extents_are_apart_and_inside(self) -> None:
        ends = 0
        for offset, size in sorted(self.taken.items()):
            assert offset >= ends
            assert offset % LINE == 0
            ends = offset + size
        assert ends <= HEAP_LINES * LINE

    @invariant()
    def no_byte_is_lost(self) -> None:
        assert self.allocator.free_bytes + sum(self.taken.values()) == HEAP_LINES * LINE

    @invariant()
    def holes_are_sorted_and_never_touch(self) -> None:
        holes = list(zip(self.allocator._starts, self.allocator._sizes, strict=True))
        assert all(size > 0 for _, size in holes)
        assert all(start + size < following for (start, size), (following, _) in pairwise(holes))


TestExtentsAgainstLines = ExtentsAgainstLines.TestCase
TestExtentsAgainstLines.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
