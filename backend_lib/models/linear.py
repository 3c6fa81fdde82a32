"""Linear layers whose weights are kept in one of several formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

GROUP = 32  # inputs that share a scale in quantised weights
# `int8` and `int4` are what they say; `auto` is 4 bits where that loses nothing, else 8.
QUANTISED = ("auto", "int8", "int4")

# x [T, in] → [T, out], float32 on a CPU and the type of the weights on a GPU
Linear = Callable[[torch.Tensor], torch.Tensor]


class DenseLinear:
    """y = x Wᵀ + b, all of one type."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class DenseHead(DenseLinear):
    """Logits are float32: in 16 bits many would be equal."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda and x.dtype != torch.float32:
            return torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return F.linear(x, self.weight).float()


class Fp16Linear:
    """Weights float16, packed for fbgemm; sums in float32. Half the memory traffic of `DenseLinear` in float32.

    Weights beyond float16's range (65,504) are clipped by the packing.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)  # clips its argument in place

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


def _quantised(weight: torch.Tensor, bias: torch.Tensor | None, weights: str) -> Linear:
    from backend_lib.models.quantised import quantise  # numba takes a second to import

    return quantise(weight, bias, weights)


_FORMATS: dict[str, Callable[[torch.Tensor, torch.Tensor | None], Linear]] = {
    "fp32": DenseLinear,
    "dense": DenseLinear,  # of whatever type the weights are
    "fp16": Fp16Linear,
    **{name: partial(_quantised, weights=name) for name in QUANTISED},
}


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, weights: str) -> Linear:
    """A layer from float32 [out, in] and float32 [out] or None, in the format that the setting `weights` names.

    The layer takes the tensors over; a caller that has another use for them keeps a copy.
    """
    return _FORMATS[weights](weight, bias)


def has_vector_kernels() -> bool:
    """Whether quantised weights can be multiplied on this CPU."""
    from kernels.cpu.isa import is_supported

    return is_supported()


def is_quantised(weights: str, inputs: int) -> bool:
    """Whether `make_linear` makes codes of a matrix with so many inputs."""
    return weights in QUANTISED and not (weights == "auto" and inputs % GROUP)


def make_embedding(linear: Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """The rows of a quantised layer, by id."""
    from backend_lib.models.quantised import QuantisedEmbedding

    return QuantisedEmbedding(linear)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Embedding:
    """Rows of `weight`, of any floating type, [V, E], by int64 [T] ids, as float32 [T, E]."""

    weight: torch.Tensor

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight).float()
