"""Linear layers in 4- and 8-bit codes, multiplied by the kernels of `kernels.cpu`."""

from __future__ import annotations

import functools

import numpy as np
import torch

from kernels.cpu import operations, program
from kernels.cpu.matmul import GROUP, PANEL
from kernels.cpu.pack import pack
from kernels.cpu.team import Team

# T tokens in the step


@functools.cache
def team() -> Team:
    """This process's threads for compute: as many as torch has been told to use."""
    return Team(torch.get_num_threads())


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

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of W at int64 [T], float32 [T, in]: an embedding."""
        out = np.empty((len(indices), self.inputs), np.float32)
        step = np.zeros(program.STEP_WORDS, np.int64)
        step[program.TOKENS], step[program.IDS] = len(indices), indices.data_ptr()
        team().run(operations.table([operations.embed(self, 1.0, out)]), step)
        return torch.from_numpy(out)
