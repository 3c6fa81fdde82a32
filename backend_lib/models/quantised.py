"""Linear layers in 4- and 8-bit codes, multiplied by the kernels of `kernels.cpu`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from backend_lib.models.linear import Fp16Linear, Linear
from backend_lib.models.threads import team
from kernels.cpu import operations, program
from kernels.cpu.matmul import GROUP, PANEL
from kernels.cpu.pack import pack

# T tokens in the step


# Rounding error, as a share of the weights, below which they must come from 4-bit codes, which can so be had back.
LOSSLESS = 1e-3
_SAMPLE = 64  # rows that tell whether a matrix may


def quantise(weight: torch.Tensor, bias: torch.Tensor | None, weights: str) -> Linear:
    """A layer in the format that `weights` names: `int4`, `int8`, or `auto`, the smaller where it loses nothing."""
    if weight.shape[1] % GROUP:
        if weights == "auto":
            return Fp16Linear(weight, bias)
        raise ValueError(
            "parameter 'weights' must be auto, fp16 or fp32 for this checkpoint: "
            f"a layer with {weight.shape[1]} inputs cannot be cut into groups of {GROUP}, as int8 and int4 need"
        )
    if weights == "int4":
        return QuantisedLinear(weight, bias, 4)
    if weights == "auto" and pack(weight[:_SAMPLE].numpy(), 4)[1] < LOSSLESS:
        layer = QuantisedLinear(weight, bias, 4)
        if layer.error < LOSSLESS:
            return layer
    return QuantisedLinear(weight, bias, 8)


class QuantisedLinear:
    """y = x Wᵀ + b with W in groups of 32 codes along its inputs, and x rounded to 8-bit codes likewise.

    Args:
        weight: float32 [out, in], `in` a multiple of 32.
        bias: float32 [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> None:
        self.outputs, self.inputs = weight.shape
        self.bits = bits
        self.packed, self.error = pack(weight.numpy(), bits)
        self.bias = np.zeros(-(-self.outputs // PANEL) * PANEL, np.float32)
        if bias is not None:
            self.bias[: self.outputs] = bias.numpy()

    @property
    def groups(self) -> int:
        return self.inputs // GROUP

    @property
    def panels(self) -> int:
        return -(-self.outputs // PANEL)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, in] → float32 [T, out], by itself; a decoder's program runs all of its layers at once."""
        x = x.contiguous()
        codes = np.empty((len(x), self.inputs), np.int8)
        scales = np.empty((len(x), self.groups, 2), np.float32)
        out = np.empty((len(x), self.panels * PANEL), np.float32)
        rounded = operations.quantise(x.numpy(), self.groups, codes, scales)
        product = operations.linear(self, codes, scales, out)
        step = np.zeros(program.STEP_WORDS, np.int64)
        step[program.TOKENS] = len(x)
        team().run(operations.table([rounded, product]), step)
        return torch.from_numpy(out)[:, : self.outputs]


@dataclass(frozen=True)
class QuantisedEmbedding:
    """Rows of `weight`, which may be the head too, by int64 [T] ids, as float32 [T, E]."""

    weight: QuantisedLinear

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        out = np.empty((len(ids), self.weight.inputs), np.float32)
        step = np.zeros(program.STEP_WORDS, np.int64)
        step[program.TOKENS], step[program.IDS] = len(ids), ids.data_ptr()
        team().run(operations.table([operations.embed(self.weight, 1.0, out)]), step)
        return torch.from_numpy(out)
