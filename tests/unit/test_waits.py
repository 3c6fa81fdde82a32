"""The guard around launches where a CPU stands in for a GPU: what would wait for the device raises."""

from __future__ import annotations

import pytest
import torch

from backend_lib.worker.waits import cpu_guard, no_guard

VALUES = torch.arange(4)
WAITING = {
    "item": lambda: VALUES[1].item(),
    "bool": lambda: bool((VALUES >= 0).all()),
    "nonzero": lambda: VALUES.nonzero(),
    "unique": lambda: VALUES.unique(),
    "mask": lambda: VALUES[VALUES > 1],
    "masked_select": lambda: VALUES.masked_select(VALUES > 1),
    "repeats": lambda: torch.repeat_interleave(VALUES, VALUES),
    "assigned by mask": lambda: VALUES.clone().__setitem__(VALUES > 1, VALUES[:2]),
}
LAUNCHES = {
    "arithmetic": lambda: (VALUES * 2).cumsum(0),
    "index": lambda: VALUES[torch.tensor([3, 1])],
    "assigned": lambda: VALUES.clone().__setitem__(torch.tensor([3, 1]), 5),
    "where": lambda: torch.where(VALUES > 1, VALUES, 0),
    "topk": lambda: VALUES.topk(2),
}


@pytest.mark.parametrize("what", WAITING)
def test_what_waits_is_refused(what: str) -> None:
    with pytest.raises(RuntimeError, match="would wait for the device"), cpu_guard():
        WAITING[what]()
    with no_guard():
        WAITING[what]()


@pytest.mark.parametrize("what", LAUNCHES)
def test_what_launches_is_not(what: str) -> None:
    with cpu_guard():
        LAUNCHES[what]()
