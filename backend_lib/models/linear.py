"""Linear layers whose weights are kept in one of several formats. Activations are float32 in all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

# x float32 [T, in] → float32 [T, out]
Linear = Callable[[torch.Tensor], torch.Tensor]


class Fp32Linear:
    """y = x Wᵀ + b, all float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Fp16Linear:
    """Weights float16, packed for fbgemm; sums in float32. Half the memory traffic of `Fp32Linear`.

    Weights beyond float16's range (65,504) are clipped by the packing.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)  # clips its argument in place

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


def quantised(weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> Linear:
    from backend_lib.models.quantised import QuantisedLinear  # numba takes a second to import

    return QuantisedLinear(weight, bias, bits)


_FORMATS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], Linear]] = {
    "fp32": Fp32Linear,
    "fp16": Fp16Linear,
    "int8": partial(quantised, bits=8),
    "int4": partial(quantised, bits=4),
    "auto": Fp16Linear,
}


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, weights: str) -> Linear:
    """A layer from float32 [out, in] and float32 [out] or None, in the format that the setting `weights` names.

    The layer takes the tensors over; a caller that has another use for them keeps a copy.
    """
    return _FORMATS[weights](weight, bias)
