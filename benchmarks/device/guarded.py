"""Outputs that were NaN before, with rows around them that must stay as they are, and how far results may be off."""

from __future__ import annotations

from typing import Any

import torch

_MARK = 0x5C  # the byte that integers are filled with

# Largest error, as a share of a value or of the largest value: what one rounding of the output comes to, and some more.
BOUNDS = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Guarded:
    """`view`: [rows, ...], with a row before and a row after it."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self._whole = torch.empty((shape[0] + 2, *shape[1:]), dtype=dtype, device=device)
        if dtype.is_floating_point:
            self._whole.fill_(torch.nan)
        else:
            self._whole.view(torch.uint8).fill_(_MARK)
        self.view = self._whole[1:-1]
        self._before = self._edges()

    def _edges(self) -> torch.Tensor:
        return torch.stack([self._whole[0], self._whole[-1]]).contiguous().view(torch.uint8).clone()

    @property
    def is_whole(self) -> bool:
        return torch.equal(self._edges(), self._before)


def close(found: torch.Tensor, exact: torch.Tensor, *guards: Guarded, bound: float | None = None) -> dict[str, Any]:
    """How far `found` is from `exact`, in shares of 1 + |exact|. NaN is as far as can be."""
    exact = exact.double().to(found.device)
    errors = (found.double() - exact).abs() / (1 + exact.abs())
    errors = torch.where(found.double() == exact, 0.0, errors).nan_to_num(torch.inf, torch.inf, torch.inf)
    worst = float(errors.max()) if errors.numel() else 0.0
    bound = BOUNDS[found.dtype] if bound is None else bound
    intact = all(each.is_whole for each in guards)
    return {"ok": worst <= bound and intact, "off": worst, "bound": bound, "intact": intact}


def same(found: torch.Tensor, exact: torch.Tensor, *guards: Guarded) -> dict[str, Any]:
    """All values equal."""
    wrong = int((found.cpu() != exact.cpu()).sum())
    intact = all(each.is_whole for each in guards)
    return {"ok": not wrong and intact, "wrong": wrong, "of": found.numel(), "intact": intact}


def joined(*verdicts: dict[str, Any]) -> dict[str, Any]:
    """The worst of several."""
    worst = {name: max(each.get(name, 0) for each in verdicts) for name in ("off", "wrong")}
    return {"ok": all(each["ok"] for each in verdicts)} | {name: value for name, value in worst.items() if value}
