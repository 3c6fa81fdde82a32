from __future__ import annotations

import pytest

from backend_lib.checkpoint.byte_words import bytes_of


@pytest.mark.parametrize(
    "done, total, words",
    [(0, 0, "0 of 0 MB"), (12_400_000, 86_000_000, "12 of 86 MB"), (40_000_000, 16_060_000_000, "0.0 of 16.1 GB")],
)
def test_a_small_checkpoint_is_counted_in_megabytes(done: int, total: int, words: str) -> None:
    assert bytes_of(done, total) == words
