"""A GPU: one stream that computes, one that copies to it, one that copies from it, and the memory they copy through.

The loop's thread launches everything, in this order: upload → compute → download. A step's copies run in blocks of
page-locked memory that are its own until it is closed, which is after its results have come; so no copy ever reads or
writes a block that somebody changes. Two steps are under way at a time with overlap, so two blocks are made and reused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

ALIGNMENT = 16
BLOCK_BYTES = 1 << 20  # of a step's arrays at first; a step that needs more makes its block larger


class CudaDevice:
    """`guard` stands around launches: see `backend_lib.worker.waits`."""

    def __init__(self, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.launching = guard
        # Streams of torch's pool may be the same one under two names, after 32 of them.
        self.compute, self.upload, self.download = (torch.cuda.Stream() for _ in range(3))
        torch.cuda.set_stream(self.compute)
        self._free: list[Blocks] = []

    def exchange(self) -> CudaExchange:
        return CudaExchange(self, self._free.pop() if self._free else Blocks(BLOCK_BYTES, self.torch_device))

    def take_back(self, blocks: Blocks) -> None:
        self._free.append(blocks)


class Blocks:
    """Memory for one step: page-locked, and as much on the device."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.results = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.sent, self.launched, self.fetched = (torch.cuda.Event() for _ in range(3))


class CudaExchange:
    """An `Exchange` (see `backend_lib.worker.device`)."""

    def __init__(self, device: CudaDevice, blocks: Blocks) -> None:
        self._device = device
        self._blocks = blocks
        self._used = self._sent = self._fetched = 0
        self._kept: list[torch.Tensor] = []  # what a copy still reads: its memory must not be given to another

    def put(self, array: np.ndarray) -> torch.Tensor:
        source = torch.from_numpy(np.ascontiguousarray(array))
        if not source.numel():
            return torch.empty(source.shape, dtype=source.dtype, device=self._device.torch_device)
        start = self._room(source.nbytes)
        part = slice(start, start + source.nbytes)
        _typed(self._blocks.host[part], source).copy_(source)
        return _typed(self._blocks.device[part], source)

    def send(self) -> None:
        if self._sent == self._used:
            return
        part, blocks = slice(self._sent, self._used), self._blocks
        with torch.cuda.stream(self._device.upload):
            blocks.device[part].copy_(blocks.host[part], non_blocking=True)
            blocks.sent.record()
        self._device.compute.wait_event(blocks.sent)
        self._sent = self._used

    def fetch(self, tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.contiguous()
        start = self._fetched
        self._fetched = _aligned(start + tensor.nbytes)
        if self._fetched > len(self._blocks.results):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        else:
            host = _typed(self._blocks.results[start : start + tensor.nbytes], tensor)
        self._blocks.launched.record(self._device.compute)
        self._device.download.wait_event(self._blocks.launched)
        with torch.cuda.stream(self._device.download):
            host.copy_(tensor, non_blocking=True)
        self._kept += [tensor, host]
        return host.numpy()

    def launched(self) -> None:
        self._blocks.launched.record(self._device.compute)
        self._device.download.wait_event(self._blocks.launched)
        self._blocks.fetched.record(self._device.download)

    def wait(self) -> None:
        self._blocks.fetched.synchronize()

    def close(self) -> None:
        self._kept.clear()
        self._device.take_back(self._blocks)

    def _room(self, num_bytes: int) -> int:
        """Where so many bytes go. What is in a block that is too small stays there, and goes when the step is over."""
        if self._used + num_bytes > len(self._blocks.host):
            self.send()
            self._kept += [self._blocks.host, self._blocks.device, self._blocks.results]
            self._blocks = Blocks(2 * (self._used + num_bytes), self._device.torch_device)
            self._used = self._sent = self._fetched = 0
        start = self._used
        self._used = _aligned(start + num_bytes)
        return start


def _typed(octets: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return octets.view(like.dtype).view(like.shape)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
