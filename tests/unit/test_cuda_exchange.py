"""A step's copies to and from a GPU, with a runtime that puts off all work for as long as CUDA may."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from backend_lib.worker import cuda
from backend_lib.worker.cuda import Blocks, CudaDevice, CudaExchange
from tests.support.late_cuda import LateCuda

STEPS = 12


class Loop:
    """Steps as the infer loop runs them: launch, finalize the one before, sample. Each doubles what it is given."""

    def __init__(self, seed: int, sizes: tuple[int, int]) -> None:
        self.runtime = LateCuda(seed)
        self.device = CudaDevice(nullcontext, self.runtime)
        self.rng = np.random.default_rng(seed)
        self.sizes = sizes
        self.relay = torch.zeros(1, dtype=torch.int64)
        self.total = 0

    def run(self) -> None:
        previous = None
        for _ in range(STEPS):
            exchange = self.device.exchange()
            first = self.put(exchange)
            self.launch(lambda first=first: self.relay.add_(first.sum()))
            if previous:
                self.finalize(*previous)
            second = self.put(exchange)
            doubled = torch.zeros_like(second)
            self.launch(lambda doubled=doubled, second=second: doubled.copy_(2 * second))
            total = torch.zeros(1, dtype=torch.int64)
            self.launch(lambda total=total: total.copy_(self.relay))
            fetched = exchange.fetch(doubled), exchange.fetch(total)
            exchange.launched()
            self.runtime.run_some()
            self.total += int(self.sent[-2].sum())
            previous = exchange, fetched, 2 * self.sent[-1], self.total
        self.finalize(*previous)

    def put(self, exchange: CudaExchange) -> torch.Tensor:
        """Of several arrays sent at a time the last: all are where they were put."""
        self.sent = getattr(self, "sent", [])
        arrays = [self.rng.integers(1, 1 << 40, self.rng.integers(*self.sizes)) for _ in range(3)]
        tensors = [exchange.put(array) for array in arrays]
        exchange.send()
        for array, tensor in zip(arrays[:-1], tensors[:-1], strict=True):
            expected = torch.from_numpy(array.copy())
            self.launch(lambda tensor=tensor, expected=expected: self.check(tensor, expected))
        self.sent.append(arrays[-1].copy())
        for array in arrays:
            array[:] = -1  # the caller's own memory is free once it has been put
        return tensors[-1]

    def launch(self, work) -> None:
        self.device.compute.launch(work)

    @staticmethod
    def check(tensor: torch.Tensor, expected: torch.Tensor) -> None:
        assert torch.equal(tensor, expected)

    def finalize(self, exchange: CudaExchange, fetched, doubled: np.ndarray, total: int) -> None:
        exchange.wait()
        assert fetched[0].tolist() == doubled.tolist() and fetched[1].tolist() == [total]
        exchange.close()


@pytest.mark.parametrize("sizes", [(1, 20), (0, 4), (200, 900)])
@pytest.mark.parametrize("seed", range(10))
def test_arrays_and_results_of_steps_that_overlap(seed: int, sizes: tuple[int, int], monkeypatch) -> None:
    """In blocks of which some are too small."""
    monkeypatch.setattr(cuda, "BLOCK_BYTES", 1024)
    Loop(seed, sizes).run()


def test_two_blocks_serve_all_steps() -> None:
    loop = Loop(0, (1, 20))
    loop.run()
    assert len(loop.device._free) == 2


@pytest.mark.parametrize("what", ["reuse", "upload", "download", "wait", "memory"])
def test_nothing_of_the_order_can_be_left_out(what: str, monkeypatch) -> None:
    """Blocks given back early; computing that does not wait for uploads, downloads not for computing, and a loop
    not for downloads; blocks in memory that the computing stream has freed, but may still use."""
    if what == "memory":
        make_blocks = lambda self, size: Blocks(size, self.runtime, self.compute)  # noqa: E731
        monkeypatch.setattr(CudaDevice, "make_blocks", make_blocks)
    elif what == "reuse":
        make = CudaDevice.exchange

        def exchange(self):
            made = make(self)
            self._free.append(made._blocks)  # as if the step were over
            return made

        monkeypatch.setattr(CudaDevice, "exchange", exchange)
        monkeypatch.setattr(CudaDevice, "take_back", lambda self, blocks: None)
    elif what == "wait":
        monkeypatch.setattr(CudaExchange, "wait", lambda self: None)
    else:
        waiting = "compute" if what == "upload" else "download"
        init = CudaDevice.__init__

        def without(self, *args):
            init(self, *args)
            getattr(self, waiting).wait_event = lambda event: None

        monkeypatch.setattr(CudaDevice, "__init__", without)
    with pytest.raises(AssertionError):
        for seed in range(20):
            Loop(seed, (1, 20)).run()
