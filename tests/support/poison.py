"""Tensors with rubbish around them: whoever reads what is not theirs gets NaN, and whoever writes there is found."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MARK = 0x5C  # the byte that fills what is not a float


@dataclass(frozen=True)
class Poisoned:
    """A tensor that lies within a larger one.

    Attributes:
        view: [rows, ...], rows contiguous, with space between them.
    """

    view: torch.Tensor
    _whole: torch.Tensor
    _before: torch.Tensor

    def assert_rest_unchanged(self) -> None:
        """Outside the view; what was written into it does not count."""
        after = self._whole.clone()
        self._like_view(after).copy_(self._like_view(self._before))
        assert torch.equal(after.view(torch.uint8), self._before.view(torch.uint8))

    def _like_view(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())


def poisoned(values: torch.Tensor, *, between: int = 16) -> Poisoned:
    """A copy of [rows, ...], with `between` values before, after and between the rows."""
    rows, width = len(values), values[0].numel() if len(values) else 0
    stride = width + between
    whole = torch.empty(between + rows * stride, dtype=values.dtype)
    if values.is_floating_point():
        whole.fill_(float("nan"))
    else:
        whole.view(torch.uint8).fill_(_MARK)
    inner = values.new_empty(values.shape[1:]).stride()
    view = whole.as_strided(values.shape, (stride, *inner), between)
    view.copy_(values)
    return Poisoned(view, whole, whole.clone())


def poisoned_output(*shape: int, dtype: torch.dtype, between: int = 16) -> Poisoned:
    """Room for [rows, ...], NaN all of it."""
    return poisoned(torch.full(shape, float("nan"), dtype=dtype), between=between)
