"""A GPU that is not there: tensors without memory that know that they are on one, and launches that are noted.

torch's fake tensors tell every mix of host and device, and every value that would have to come back. Models may be of
their real size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from backend_lib.checkpoint import DecoderConfig
from backend_lib.config import Settings
from backend_lib.models import load as load_module
from backend_lib.models.build import DecoderBuilder
from backend_lib.models.division import divide
from backend_lib.models.graphs import Graphs
from backend_lib.models.placement import Placement, step_maker
from backend_lib.models.shapes import Part
from backend_lib.worker import machine as machine_module
from backend_lib.worker.cuda import CudaDevice
from backend_lib.worker.machine import Machine, build_machine
from backend_lib.worker.process_groups import SOLO

GPU = torch.device("cuda", 0)
LARGEST_GRID = (1 << 31) - 1, 65535, 65535
_ALIGNMENT = 512  # of what CUDA's allocator gives


class Launch(NamedTuple):
    """What a compiled kernel is kept by: another one of these is another compilation.

    `key`: of each argument its value, if it is a constant, else its type and what Triton takes for granted of it.
    """

    kernel: str
    key: tuple


class FakeGpu:
    """Attributes:
    launches: all kernels that were launched, in order.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    @contextmanager
    def present(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(InterpretedFunction, "run", lambda *args, **kwargs: self._launch(*args, **kwargs))
            patch.setattr(FakeTensor, "__getitem__", _get)
            patch.setattr(FakeTensor, "__setitem__", lambda self, index, value: _set(_get(self, index), value))
            patch.setattr(FakeTensor, "copy_", lambda self, source: torch.ops.aten.copy_(self, source))
            patch.setattr(FakeTensor, "data_ptr", _address)
            to_numpy = torch.Tensor.numpy
            patch.setattr(torch.Tensor, "numpy", lambda self: _to_numpy(to_numpy, self))
            patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
            properties = SimpleNamespace(multi_processor_count=132)
            patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
            patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
            patch.setattr(Graphs, "_captured", _captured)
            with FakeTensorMode(allow_non_fake_inputs=True):
                yield

    def machine(self, config: DecoderConfig, settings: Settings, dtype: torch.dtype, ranks: Any = SOLO) -> Machine:
        """A model of random weights, loaded and warm, or the share of one rank."""
        placement = Placement(GPU, "dense", dtype, True)
        share = divide(config, ranks.size)[ranks.rank]
        start_step = step_maker(placement, share.config, settings)
        decoder = DecoderBuilder(share, _Weights(), placement, start_step, config.max_position, ranks).decoder()
        checkpoint: Any = SimpleNamespace(config=config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine_module, "place", lambda settings, checkpoint: placement)
            patch.setattr(machine_module, "_device", lambda placement, settings: CudaDevice(_launching, _Runtime()))
            patch.setattr(load_module, "build_decoder", lambda *args: decoder)
            return build_machine(
                checkpoint, settings, config.max_position, kv_tokens=settings.kv_tokens, join=lambda device: ranks
            )

    def _launch(self, function: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        name = function.fn.__name__
        assert all(1 <= size <= most for size, most in zip(grid, LARGEST_GRID, strict=False)), (name, grid)
        self.launches.append(Launch(name, _key_of(function, args, kwargs)))


def _key_of(function: Any, args: tuple, kwargs: dict) -> tuple:
    values = dict(zip(function.arg_names, args, strict=False)) | kwargs
    names, pointers = (function.kwargs[f"do_not_specialize{end}"] or () for end in ("", "_on_alignment"))
    parameters = inspect.signature(function.fn).parameters
    key = []
    for name, value in values.items():
        is_constant = name not in parameters or "constexpr" in str(parameters[name].annotation)
        key.append((name, value if is_constant else _kind_of(value, name not in names, name not in pointers)))
    return tuple(key)


def _kind_of(value: Any, may_specialise: bool, may_align: bool) -> Any:
    if isinstance(value, torch.Tensor):
        assert value.device == GPU, "a kernel was given memory of the host"
        return value.dtype, may_specialise and may_align and value.data_ptr() % 16 == 0
    if type(value) is int:
        kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        return kind, may_specialise and (value == 1, may_align and value % 16 == 0)
    assert value is None or type(value) is float, value
    return None if value is None else "fp32"


class FakeRanks:
    """Other ranks that are not there. What is added up or gathered must be the GPU's and lie as collectives take it.

    Attributes:
        sums: how many there were.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sums = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        assert x.device == GPU and x.is_contiguous() and x.dim() == 2
        self.sums += 1

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        assert x.device == GPU and x.is_contiguous() and x.dtype == torch.float32
        return None if self.rank else torch.cat([x] * self.size, dim=1)

    def broadcast(self, x: torch.Tensor) -> None:
        assert x.device == GPU and x.is_contiguous()

    def minimum(self, number: int) -> int:
        return number


class _Weights:
    def check(self, name: str, shape: Any, expert: int | None = None) -> None: ...

    def read_into(self, out: torch.Tensor, name: str, expert: int | None = None, part: Part | None = None) -> None: ...

    def check_all_read(self) -> None: ...


class _Runtime:
    """Copies bring nothing, so that all tokens are 0."""

    torch_device = GPU

    def stream(self) -> Any:
        return SimpleNamespace(wait_event=lambda event: None)

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def device_memory(self, num_bytes: int, stream: Any) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=GPU)

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Any) -> None:
        assert {target.device.type, source.device.type} == {"cpu", "cuda"} and target.shape == source.shape


class _NoCopies(TorchDispatchMode):
    """A step's copies go through its `Exchange`; any other would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, result) if isinstance(each, torch.Tensor)]
        assert len({each.device.type for each in tensors}) < 2, f"{func} waits for a copy"
        return result


def _launching() -> AbstractContextManager[Any]:
    return _NoCopies()


def _captured(graphs: Graphs, size: int, launch: Any) -> Any:
    launch(size)
    with _launching():
        launch(size)
    return lambda: None


# In torch without CUDA indexing and copying look for it. These are the same operations.
def _get(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    at = 0
    for each in index if isinstance(index, tuple) else (index,):
        if each is None:
            tensor = tensor.unsqueeze(at)
        elif isinstance(each, int):
            tensor, at = tensor.select(at, each), at - 1
        elif isinstance(each, slice):
            tensor = torch.ops.aten.slice(tensor, at, *each.indices(tensor.shape[at]))
        elif each is not Ellipsis:
            tensor = torch.ops.aten.index(tensor, [None] * at + [each])
        else:
            at = tensor.dim() - 2
        at += 1
    return tensor


def _set(part: torch.Tensor, value: Any) -> None:
    part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)


def _address(tensor: torch.Tensor) -> int:
    return _ALIGNMENT + tensor.storage_offset() * tensor.itemsize if tensor.numel() else 0


def _to_numpy(to_numpy: Callable[[torch.Tensor], np.ndarray], tensor: torch.Tensor) -> np.ndarray:
    if not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return to_numpy(tensor)
    assert tensor.device.type == "cpu", "a GPU's memory is read on the host"
    return np.zeros(tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
