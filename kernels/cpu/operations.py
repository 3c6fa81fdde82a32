"""Rows of a program, from arrays: what each kind of operation is told.

Arrays are C-contiguous, a row for each token or more rows than a step has tokens. The program does not keep them alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kernels.cpu import program
from kernels.cpu.matmul import GROUP, PANEL


class Packed(Protocol):
    """Weights of a linear layer, as `kernels.cpu.pack` makes them, with a bias for all outputs of all panels."""

    packed: np.ndarray
    bias: np.ndarray
    bits: int

    @property
    def groups(self) -> int: ...
    @property
    def panels(self) -> int: ...


def table(rows: Sequence[list[int]]) -> np.ndarray:
    out = np.zeros((len(rows), program.WIDTH), np.int64)
    for row, words in zip(out, rows, strict=True):
        row[: len(words)] = words
    return out


def embed(weights: Packed, scale: float, out: np.ndarray) -> list[int]:
    """out = scale * the rows of the step's ids."""
    return [program.EMBED, _at(weights.packed), weights.bits, weights.groups, _bits(scale), _at(out), _stride(out)]


def rotation(frequencies: np.ndarray, magnitude: float, out: np.ndarray) -> list[int]:
    """Cosines and sines of the step's positions, float32 [T, 2, half]."""
    return [program.ROTATION, _at(frequencies), len(frequencies), _bits(magnitude), _at(out)]


def norm(
    x: np.ndarray, weight: np.ndarray, eps: float, codes: np.ndarray, scales: np.ndarray, *, of_logits: bool = False
) -> list[int]:
    """RMS norm, as codes. `of_logits`: of the tokens that are given logits only, in their order."""
    groups = len(weight) // GROUP
    return [program.NORM, _at(x), _stride(x), _at(weight), _bits(eps), groups, _at(codes), _at(scales), int(of_logits)]


def add_norm(x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray) -> list[int]:
    """out += RMS norm of x."""
    groups = len(weight) // GROUP
    return [program.ADD_NORM, _at(x), _stride(x), _at(weight), _bits(eps), groups, _at(out), _stride(out)]


def linear(
    weights: Packed, codes: np.ndarray, scales: np.ndarray, out: np.ndarray, *,
    adds: bool = False, of_logits: bool = False,
) -> list[int]:  # fmt: skip
    """out = codes Wᵀ + bias, or out += that. `out` has columns for all panels."""
    return [
        program.LINEAR, weights.bits, _at(weights.packed), _at(weights.bias), weights.panels, weights.groups,
        _at(codes), _at(scales), _at(out), _stride(out), int(adds), int(of_logits),
    ]  # fmt: skip


def heads(
    x: np.ndarray, shape: tuple[int, int, int], *, norm: tuple[np.ndarray, float] | None,
    rotation: np.ndarray | None, scale: float, layer: int, kv_bytes: int,
) -> list[int]:  # fmt: skip
    """Norm, rotate and scale heads in place, and put keys and values into the pool.

    `shape`: query heads, key-value heads, head_dim. `norm`: float32 [query and key heads, head_dim] and its eps.
    `kv_bytes`: 2 for float16, 4 for float32.
    """
    weight, eps = (_at(norm[0]), _bits(norm[1])) if norm else (0, 0)
    at, half = (_at(rotation), rotation.shape[-1]) if rotation is not None else (0, 0)
    return [program.HEADS, _at(x), _stride(x), *shape, weight, eps, at, half, _bits(scale), layer, kv_bytes]


def attend(
    x: np.ndarray, shape: tuple[int, int, int], out: np.ndarray, *, window: int | None, cap: float | None,
    layer: int, kv_bytes: int,
) -> list[int]:  # fmt: skip
    """Attention of the heads in `x` over the pool. `window`: how many tokens a query looks at, itself included."""
    return [
        program.ATTEND, _at(x), _stride(x), *shape, _at(out), _stride(out), window or 0, _bits(cap or 0.0), layer,
        kv_bytes,
    ]  # fmt: skip


def quantise(x: np.ndarray, groups: int, codes: np.ndarray, scales: np.ndarray) -> list[int]:
    return [program.QUANTISE, _at(x), _stride(x), groups, _at(codes), _at(scales)]


def activate(kind: int, gate_up: np.ndarray, inner: int, codes: np.ndarray, scales: np.ndarray) -> list[int]:
    """activation(gate) * up, as codes; `gate_up` has `inner` columns of gate, then as many of up."""
    return [program.ACTIVATE, kind, _at(gate_up), _stride(gate_up), inner // GROUP, _at(codes), _at(scales)]


def soft_cap(x: np.ndarray, cap: float) -> list[int]:
    """x = cap * tanh(x / cap), of the rows that are given logits."""
    return [program.SOFT_CAP, _at(x), _stride(x), x.shape[1] // PANEL, _bits(cap)]


def _at(array: np.ndarray) -> int:
    return array.ctypes.data


def _stride(array: np.ndarray) -> int:
    return array.strides[0]


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
