"""For how many rows graphs are made, and which of them a step is filled up to."""

from __future__ import annotations

import pytest
import torch

from backend_lib.models.graphs import Graphs, graph_sizes


def test_sizes() -> None:
    assert graph_sizes(1) == [1] and graph_sizes(5) == [1, 2, 4, 5] and graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(256) == [1, 2, 4, *range(8, 257, 8)]


@pytest.mark.parametrize("largest", [1, 3, 9, 100, 300, 511, 512, 513, 1000])
def test_little_is_filled_up(largest: int) -> None:
    """All counts have a size, and fewer than eight rows, or one in eight of them, are padding."""
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    graphs = Graphs(torch.device("cpu"))
    ran: list[int] = []
    graphs.capture(sizes, ran.append)
    for count in range(1, largest + 1):
        size = graphs.size_for(count)
        assert count <= size < max(count + 8, 1.125 * count)
        graphs.replay(size)
        assert ran.pop() == size
    assert graphs.size_for(largest + 1) == largest + 1 and not graphs.has(largest + 1)
