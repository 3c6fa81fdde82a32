"""Launches that are captured once and replayed: a replay costs the CPU microseconds, whatever the number of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

Launch = Callable[[], None]


def graph_sizes(largest: int) -> list[int]:
    """How many rows graphs are made for, rising, up to `largest`: what is between is padded."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, largest + 32, 32)]
    return sorted({min(size, largest) for size in sizes})


class Graphs:
    """By size, from largest to smallest, all in one pool of memory: only one of them runs at a time.

    On a CPU, under Triton's interpreter, a launch is its own graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._is_gpu else None
        self._replays: dict[int, Launch] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []  # a replay does not hold its graph

    def capture(self, sizes: Iterable[int], launch: Callable[[int], None]) -> None:
        """`launch(size)` works in memory of its own that stays where it is, and never waits for the device."""
        for size in sorted(sizes, reverse=True):
            self._replays[size] = self._captured(size, launch) if self._is_gpu else partial(launch, size)

    def _captured(self, size: int, launch: Callable[[int], None]) -> Launch:
        launch(size)  # kernels are compiled and libraries set up outside the graph
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread asks after earlier collectives meanwhile, which is no part of the capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            launch(size)
        self._graphs.append(graph)
        return graph.replay

    def size_for(self, count: int) -> int:
        """The smallest captured size that holds so many; the count itself where none does."""
        return min((size for size in self._replays if size >= count), default=count)

    def has(self, size: int) -> bool:
        return size in self._replays

    def replay(self, size: int) -> None:
        self._replays[size]()
