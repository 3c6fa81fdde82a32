"""What a step exchanges with the device: arrays that go there before it, and results that come back after it.

A GPU's side of this is `backend_lib.worker.cuda`. On a CPU both are the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

# From an array in host memory to a tensor on the device. The array must not be changed afterwards.
Put = Callable[[np.ndarray], torch.Tensor]


class Exchange(Protocol):
    """One step's, from `Device.exchange` until `close`. Nothing in it is rewritten meanwhile."""

    def put(self, array: np.ndarray) -> torch.Tensor:
        """An array for the device: to be used by what is launched after the next `send`, until `close`."""

    def send(self) -> None:
        """What has been put is there for all that is launched from now on."""

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        """A result, to be read after `wait`. All that computes it has been launched."""

    def launched(self) -> None:
        """All of the step has been launched."""

    def wait(self) -> None:
        """Until all that was launched before `launched` is done, and what was fetched has come."""

    def close(self) -> None:
        """The step is over: what it launched is done."""


class Device(Protocol):
    """Where a worker computes."""

    torch_device: torch.device

    def exchange(self) -> Exchange:
        """For a new step."""

    def launching(self) -> AbstractContextManager[None]:
        """Around what launches work and must never wait for it."""


class CpuExchange:
    def put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array)

    def send(self) -> None: ...

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        return tensor.numpy()

    def launched(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class CpuDevice:
    """`guard` stands around launches: see `backend_lib.worker.waits`."""

    torch_device = torch.device("cpu")

    def __init__(self, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self.launching = guard

    def exchange(self) -> CpuExchange:
        return CpuExchange()
