"""A GPU: one stream that computes, one that copies to it, one that copies from it, and the memory they copy through.

The loop's thread launches everything, in this order: upload → compute → download. A step's copies run in blocks of
page-locked memory that are its own until it is closed, which is after its results have come; so no copy ever reads or
writes a block that somebody changes. Two steps are under way at a time with overlap, so two blocks are made and reused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

ALIGNMENT = 16
BLOCK_BYTES = 1 << 20  # of a step's arrays at first; a step that needs more makes its block larger


class Cuda:
    """What is asked of torch.cuda; tests have a runtime of their own, which puts work off for as long as it may."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    def stream(self) -> Any:
        return torch.cuda.Stream()

    def event(self) -> Any:
        return torch.cuda.Event()

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Page-locked, so that a copy need not wait."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_memory(self, num_bytes: int, stream: Any) -> torch.Tensor:
        """What the stream has freed: work that it was given before may still use it."""
        with torch.cuda.stream(stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


class CudaDevice:
    """`guard` stands around launches: see `backend_lib.worker.waits`.

    Attributes:
        compute: the stream on which models are launched; the caller makes it torch's current one.
    """

    def __init__(self, guard: Callable[[], AbstractContextManager[None]], runtime: Any) -> None:
        self.runtime = runtime
        self.torch_device = runtime.torch_device
        self.launching = guard
        self.compute, self.upload, self.download = (runtime.stream() for _ in range(3))
        self._free: list[Blocks] = []

    def exchange(self) -> CudaExchange:
        return CudaExchange(self, self._free.pop() if self._free else self.make_blocks(BLOCK_BYTES))

    def make_blocks(self, num_bytes: int) -> Blocks:
        """The device's is the upload stream's, which writes it first: of the computing stream's memory a launch that
        is still under way might be using some."""
        return Blocks(num_bytes, self.runtime, self.upload)

    def take_back(self, blocks: Blocks) -> None:
        self._free.append(blocks)


class Blocks:
    """Memory for one step: page-locked, and as much on the device."""

    def __init__(self, num_bytes: int, runtime: Any, upload: Any) -> None:
        self.host = runtime.host_memory(num_bytes)
        self.device = runtime.device_memory(num_bytes, upload)
        self.results = runtime.host_memory(num_bytes)
        self.sent, self.launched, self.fetched = (runtime.event() for _ in range(3))


class CudaExchange:
    """An `Exchange` (see `backend_lib.worker.device`)."""

    def __init__(self, device: CudaDevice, blocks: Blocks) -> None:
        self._device = device
        self._blocks = blocks
        self._used = self._sent = self._fetched = 0
        # What a copy or a kernel may still use: its memory must not be given to another.
        self._kept: list[Any] = []

    def put(self, array: np.ndarray) -> torch.Tensor:
        source = torch.from_numpy(np.ascontiguousarray(array))
        start = self._room(source.nbytes)
        part = slice(start, start + source.nbytes)
        _typed(self._blocks.host[part], source).copy_(source)
        return _typed(self._blocks.device[part], source)

    def send(self) -> None:
        if self._sent == self._used:
            return
        device, blocks, part = self._device, self._blocks, slice(self._sent, self._used)
        device.runtime.copy(blocks.device[part], blocks.host[part], device.upload)
        blocks.sent.record(device.upload)
        device.compute.wait_event(blocks.sent)
        self._sent = self._used

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        device, blocks, tensor = self._device, self._blocks, tensor.contiguous()
        host = _typed(self._room_for_result(tensor.nbytes), tensor)
        blocks.launched.record(device.compute)
        device.download.wait_event(blocks.launched)
        device.runtime.copy(host, tensor, device.download)
        self._kept.append(tensor)
        return host.numpy()

    def launched(self) -> None:
        device, blocks = self._device, self._blocks
        blocks.launched.record(device.compute)
        device.download.wait_event(blocks.launched)
        blocks.fetched.record(device.download)

    def wait(self) -> None:
        self._blocks.fetched.synchronize()

    def close(self) -> None:
        self._kept.clear()
        self._device.take_back(self._blocks)

    def _room(self, num_bytes: int) -> int:
        """Where so many bytes go. A block that is too small is kept for what is in it until the step is over."""
        if self._used + num_bytes > len(self._blocks.host):
            self.send()
            self._kept.append(self._blocks)
            self._blocks = self._device.make_blocks(2 * (self._used + num_bytes))
            self._used = self._sent = self._fetched = 0
        start = self._used
        self._used = min(_aligned(start + num_bytes), len(self._blocks.host))
        return start

    def _room_for_result(self, num_bytes: int) -> torch.Tensor:
        start = self._fetched
        if start + num_bytes > len(self._blocks.results):
            extra: torch.Tensor = self._device.runtime.host_memory(num_bytes)
            self._kept.append(extra)
            return extra
        self._fetched = min(_aligned(start + num_bytes), len(self._blocks.results))
        return self._blocks.results[start : start + num_bytes]


def _typed(octets: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return octets.view(like.dtype).view(like.shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
