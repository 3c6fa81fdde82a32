"""Ways to keep a linear layer's weights that are no settings, put in the place of `make_linear` to be measured.

All but fbgemm's are computed in float32 from rounded values: they tell what the rounding costs, and nothing of speed.
Keys, values and all else are float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from backend_lib.models.linear import GROUP, Linear
from kernels.cpu.pack import pack, unpack

MakeLinear = Callable[[torch.Tensor, torch.Tensor | None, str], Linear]


def round_weight_(weight: torch.Tensor, bits: int) -> None:
    """In place to the grid that `bits` has, so that a tied embedding is rounded too."""
    packed, _ = pack(weight.numpy(), bits)
    outputs, inputs = weight.shape
    unpack(packed.ctypes.data, bits, inputs // GROUP, outputs, weight.data_ptr())


def round_by_row(x: torch.Tensor) -> torch.Tensor:
    """float32 [T, in] to 255 steps between minus and plus the largest of each row."""
    step = x.abs().amax(-1, keepdim=True).div_(127).clamp_min_(1e-30)
    return (x / step).round_().mul_(step)


def round_by_group(x: torch.Tensor) -> torch.Tensor:
    """The same by groups of 32, as the kernels do."""
    return round_by_row(x.view(len(x), -1, GROUP)).view(x.shape)


@dataclass(frozen=True)
class RoundedLinear:
    """y = round(x) Wᵀ + b in float32."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    round_input: Callable[[torch.Tensor], torch.Tensor] | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.round_input(x) if self.round_input else x, self.weight, self.bias)


class FbgemmInt8Linear:
    """8-bit weights with a scale for each output, inputs with a scale for each row, by fbgemm.

    fbgemm has one scale for all rows, so each is divided by its largest value first; and sums of pairs of products
    must fit into 16 bits, which 7-bit inputs (`reduce_range`) see to.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        scales = weight.abs().amax(1).div(127).clamp_min_(1e-12).double()
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch means to drop such tensors one day
            codes = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(codes, None)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.abs().amax(1, keepdim=True).clamp_min_(1e-30)
        out = torch.ops.quantized.linear_dynamic(x / largest, self.packed, reduce_range=True) * largest
        return out if self.bias is None else out.add_(self.bias)


def _rounded(
    weight: torch.Tensor, bias: torch.Tensor | None, _: str, *, bits: int | None,
    inputs: Callable[[torch.Tensor], torch.Tensor] | None,
) -> Linear:  # fmt: skip
    if bits:
        round_weight_(weight, bits)
    return RoundedLinear(weight, bias, inputs)


def _fbgemm_int8(weight: torch.Tensor, bias: torch.Tensor | None, _: str) -> Linear:
    return FbgemmInt8Linear(weight, bias)


COMPARATORS: dict[str, MakeLinear] = {
    "int8-float": partial(_rounded, bits=8, inputs=None),
    "int4-float": partial(_rounded, bits=4, inputs=None),
    "exact-groups": partial(_rounded, bits=None, inputs=round_by_group),
    "exact-rows": partial(_rounded, bits=None, inputs=round_by_row),
    "int8-rows": partial(_rounded, bits=8, inputs=round_by_row),
    "fbgemm-int8": _fbgemm_int8,
}
MEANINGS = {
    "int8-float": "8-bit weights as int8's, float32 activations",
    "int4-float": "4-bit weights as int4's, float32 activations",
    "exact-groups": "the checkpoint's own weights (for a GGUF: its own grid), activations as int8's",
    "exact-rows": "the checkpoint's own weights, 8-bit activations with one scale a row",
    "int8-rows": "8-bit weights as int8's, 8-bit activations with one scale a row",
    "fbgemm-int8": "fbgemm: 8-bit weights with one scale an output, 7-bit activations with one scale a row",
}
