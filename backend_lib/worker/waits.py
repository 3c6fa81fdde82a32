"""Proof that launching never waits: with `debug: on` an operation that would wait for the device raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
# A value on the CPU, or a size that depends on values. A copy from a device is like any other copy on a
# CPU, and is left to `cuda_guard`.
_WAITING = frozenset(
    overload
    for packet in (
        _aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten._unique2, _aten.unique_dim,
        _aten.unique_consecutive, _aten.bincount, _aten.equal, _aten.is_nonzero,
    )
    for overload in (getattr(packet, name) for name in packet.overloads())
)  # fmt: skip

_INDEXING = frozenset((_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default))


def no_guard() -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def cuda_guard() -> Iterator[None]:
    """torch itself watches its synchronising calls."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def cpu_guard() -> Iterator[None]:
    """For a CPU that stands in for a GPU: raises where a GPU's values would have to come back."""
    with _NoWaits():
        yield


class _NoWaits(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counts = func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in _WAITING or counts or (func in _INDEXING and any(map(_is_mask, args[1]))):
            raise RuntimeError(f"{func} would wait for the device")
        return func(*args, **kwargs)


def _is_mask(index: torch.Tensor | None) -> bool:
    """How many tokens it chooses is known to the device alone."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)
