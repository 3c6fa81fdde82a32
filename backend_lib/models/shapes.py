"""What a tensor must look like."""

from __future__ import annotations

from collections.abc import Sequence


def check_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises ValueError naming the tensor, its shape and the one wanted."""
    if tuple(shape) != tuple(wanted):
        raise ValueError(f"tensor '{name}' has the shape {list(shape)}; the configuration asks for {list(wanted)}")
