"""KV bookkeeping: indices handed out and given back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_lib.worker.kv_cache import KvCache


def allocate(cache: KvCache, row: int, start: int, count: int) -> list[int]:
    return cache.allocate(np.full(count, row), np.arange(start, start + count)).tolist()


def test_a_fresh_cache_hands_out_ascending_runs() -> None:
    cache = KvCache(num_tokens=10, num_rows=2, max_len=10)
    assert allocate(cache, 0, 0, 4) == [0, 1, 2, 3]
    assert allocate(cache, 1, 0, 3) == [4, 5, 6]
    assert cache.num_free == 3


def test_a_run_that_was_freed_is_handed_out_in_the_same_order() -> None:
    cache = KvCache(num_tokens=10, num_rows=2, max_len=10)
    cache.give_back(np.array(allocate(cache, 0, 0, 4)))
    assert allocate(cache, 1, 0, 6) == [0, 1, 2, 3, 4, 5]


def test_more_than_there_is_is_a_mistake_of_the_caller() -> None:
    cache = KvCache(num_tokens=3, num_rows=1, max_len=10)
    with pytest.raises(AssertionError, match="4 KV indices wanted, 3 are free"):
        allocate(cache, 0, 0, 4)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=60))
def test_an_index_is_free_or_in_one_place(actions: list[tuple[int, int]]) -> None:
    """A row that holds something is freed; one that holds nothing is given tokens, one call or two."""
    cache = KvCache(num_tokens=20, num_rows=4, max_len=12)
    lens = [0] * 4
    for row, count in actions:
        if lens[row]:
            cache.give_back(cache.table[row, : lens[row]])
            lens[row] = 0
        elif 2 * count <= cache.num_free:
            assert allocate(cache, row, 0, count) == cache.table[row, :count].tolist()
            assert allocate(cache, row, count, count) == cache.table[row, count : 2 * count].tolist()
            lens[row] = 2 * count
        held = [index for each, length in enumerate(lens) for index in cache.table[each, :length].tolist()]
        assert sorted(held + cache._free[: cache.num_free].tolist()) == list(range(20))
        assert cache.num_tokens - cache.num_free == len(held)
