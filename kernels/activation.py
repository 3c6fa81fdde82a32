"""The gated activation of an MLP.

T tokens · I intermediate size
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.compiling import Specialisation
from kernels.tuning import Config, chosen

KINDS = ("silu", "gelu_pytorch_tanh")


@triton.jit
def activate(x, KIND: tl.constexpr):
    """float32. Both are x times a sigmoid: (1 + tanh u) / 2 is the sigmoid of 2u."""
    if KIND == "silu":
        argument = x
    else:
        tl.static_assert(KIND == "gelu_pytorch_tanh")
        argument = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
    return x / (1.0 + tl.exp(-argument))


@triton.jit
def _gated_kernel(
    gate_up, out, gate_up_stride, out_stride, SIZE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(gate_up + token * gate_up_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * gate_up_stride + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + at, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=inside)


def gated(gate_up: torch.Tensor, out: torch.Tensor, *, kind: str) -> torch.Tensor:
    """out = activation(gate) * up.

    Args:
        gate_up: [T, 2I] of any float dtype, rows contiguous: gate, then up.
        out: [T, I] of any float dtype, rows contiguous.
        kind: one of `KINDS`.
    """
    tokens, size = out.shape
    assert kind in KINDS, kind
    assert gate_up.shape == (tokens, 2 * size) and gate_up.stride(1) == out.stride(1) == 1
    if not tokens:
        return out
    config = _config(size)
    _gated_kernel[(tokens, triton.cdiv(size, config.blocks["BLOCK"]))](
        gate_up, out, gate_up.stride(0), out.stride(0), size, kind, **config.blocks,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _config(size: int) -> Config:
    return chosen("gated", f"{size}", Config({"BLOCK": min(1024, triton.next_power_of_2(size))}, 4, 1))


def reference_gated(gate_up: torch.Tensor, out: torch.Tensor, *, kind: str) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=1)
    return out.copy_((F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up)


def serving() -> Iterator[Specialisation]:
    for dtype in ("bf16", "fp16", "fp32"):
        for size, kind in ((1536, "silu"), (14336, "silu"), (14336, "gelu_pytorch_tanh")):
            config = _config(size)
            signature = {
                "gate_up": f"*{dtype}", "out": f"*{dtype}", "gate_up_stride": "i32", "out_stride": "i32",
            }  # fmt: skip
            constants = {"SIZE": size, "KIND": kind, **config.blocks}
            words = f"{dtype}, {kind}, {size} wide"
            yield Specialisation(words, _gated_kernel, signature, constants, config.num_warps, config.num_stages)
