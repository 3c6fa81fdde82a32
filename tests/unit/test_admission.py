"""The estimate of the KV cache's peak, against lives played out step by step."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backend_lib.worker.admission import HISTORY, MIN_HISTORY, QUANTILE, OutputHistory, peak


def played_peak(held: list[int], remaining: list[int]) -> int:
    """Each grows by one a step and frees all it holds when it has produced what remained."""
    most, step = 0, 0
    while any(left >= step for left in remaining):
        most = max(most, sum(has + step for has, left in zip(held, remaining, strict=True) if left >= step))
        step += 1
    return most


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=8))
def test_the_peak_is_that_of_a_life_played_out(sequences: list[tuple[int, int]]) -> None:
    held, remaining = [has for has, _ in sequences], [left for _, left in sequences]
    assert peak(np.array(held, dtype=int), np.array(remaining, dtype=int)) == played_peak(held, remaining)


def test_the_peak_of_three() -> None:
    """The third is the first to end: then they hold 3, 5 and 12. When the second ends, 4 and 6; the first, 10."""
    assert peak(np.array([1, 3, 10]), np.array([9, 3, 2])) == 3 + 5 + 12
    assert peak(np.array([1, 3, 10]), np.array([30, 3, 2])) == 1 + 30
    assert peak(np.array([], dtype=int), np.array([], dtype=int)) == 0


class NaiveHistory:
    def __init__(self) -> None:
        self.lengths: list[int] = []

    def remaining(self, produced: int, allowed: int) -> int:
        lengths = sorted(self.lengths[-HISTORY:])
        longer = [length for length in lengths if length > produced]
        if len(lengths) < MIN_HISTORY or not longer:
            return allowed - produced
        predicted = longer[min(int(len(longer) * QUANTILE), len(longer) - 1)]
        return min(predicted, allowed) - produced


@given(
    st.lists(st.integers(1, 40), max_size=60),
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=5),
)
def test_what_remains_is_the_quantile_of_those_that_grew_longer(lengths, rows) -> None:
    history, naive = OutputHistory(), NaiveHistory()
    for length in lengths:
        history.add(length)
        naive.lengths.append(length)
    produced = np.array([row[0] for row in rows])
    allowed = produced + [row[1] for row in rows]
    expected = [naive.remaining(*row) for row in zip(produced.tolist(), allowed.tolist(), strict=True)]
    assert history.remaining(produced, allowed).tolist() == expected


def test_only_the_last_ends_count() -> None:
    history, naive = OutputHistory(), NaiveHistory()
    for number in range(3 * HISTORY):
        history.add(number * 7919 % 1000 + 1)
        naive.lengths.append(number * 7919 % 1000 + 1)
    produced = np.arange(0, 1100, 50)
    expected = [naive.remaining(each, 2000) for each in produced.tolist()]
    assert history.remaining(produced, np.full_like(produced, 2000)).tolist() == expected
    for _ in range(HISTORY):
        history.add(5)
    assert history.remaining(np.array([2, 5]), np.array([99, 99])).tolist() == [3, 94]


def test_a_short_past_says_nothing() -> None:
    history = OutputHistory()
    for _ in range(MIN_HISTORY - 1):
        history.add(3)
    assert history.remaining(np.array([1]), np.array([50])).tolist() == [49]
    history.add(3)
    assert history.remaining(np.array([1]), np.array([50])).tolist() == [2]
