"""CUDA's graphs without a GPU: what a capture launches is written down, and a replay does it again.

Each operation finds its arguments where they were and leaves its results there. So what a graph must not hold shows: a
number that belongs to a step, or memory that another step's Python has replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from backend_lib.models.graphs import Graphs

Work = Callable[[], Any]


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self.work.append(lambda: _leave(func(*args, **kwargs), results))
        return results

    @torch.inference_mode()
    def replay(self) -> None:
        for each in self.work:
            each()


@contextmanager
def recorded_graphs() -> Iterator[list[Recording]]:
    """The graphs that are captured meanwhile."""
    recordings: list[Recording] = []
    current: list[Recording] = []
    launch_kernel = InterpretedFunction.run

    def launch(function: Any, *args: Any, **kwargs: Any) -> None:
        with _disable_current_modes():
            launch_kernel(function, *args, **kwargs)
        for recording in current:
            recording.work.append(lambda: launch_kernel(function, *args, **kwargs))

    def captured(graphs: Graphs, size: int, launch: Callable[[int], None]) -> Work:
        launch(size)
        with Recording() as recording:
            current.append(recording)
            launch(size)
            current.pop()
        recordings.append(recording)
        return recording.replay

    def init(graphs: Graphs, device: torch.device) -> None:
        graphs._is_gpu, graphs._replays = True, {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", launch)
        patch.setattr(Graphs, "__init__", init)
        patch.setattr(Graphs, "_captured", captured)
        yield recordings


def _leave(results: Any, places: Any) -> None:
    """Views and what is done in place are there already."""
    for result, place in zip(tree_leaves(results), tree_leaves(places), strict=True):
        if isinstance(result, torch.Tensor) and result.data_ptr() != place.data_ptr():
            place.copy_(result)
