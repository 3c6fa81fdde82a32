"""RMS norm of the residual stream (Zhang and Sennrich, 2019), and the additions before it, in one launch.

T tokens · E hidden size
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.compiling import Specialisation
from kernels.tuning import Config, chosen


@triton.jit(do_not_specialize=["eps"])
def _add_norm_kernel(
    hidden, addend, weight, addend_weight, out, eps, addend_stride, out_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_ADDEND: tl.constexpr, HAS_ADDEND_NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < SIZE
    x = tl.load(hidden + token * SIZE + at, mask=inside, other=0.0)
    scale = tl.load(weight + at, mask=inside, other=0.0)
    if HAS_ADDEND:
        added = tl.load(addend + token * addend_stride + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_ADDEND_NORM:
            added *= _inverse_rms(added, eps, SIZE) * tl.load(addend_weight + at, mask=inside, other=0.0)
        x += added
        tl.store(hidden + token * SIZE + at, x, mask=inside)
    normed = x * _inverse_rms(x, eps, SIZE) * scale
    tl.store(out + token * out_stride + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _inverse_rms(x, eps, SIZE: tl.constexpr):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + eps))


def add_norm(
    hidden: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float, *,
    addend_weight: torch.Tensor | None = None, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """hidden += addend, or += its RMS norm times `addend_weight`; then out = the RMS norm of hidden times `weight`.

    Args:
        hidden: float32 [T, E], contiguous; changed in place if there is an addend.
        addend: [T, E] of any float dtype, rows contiguous.
        weight, addend_weight: float32 [E].
        out: [T, E] of any float dtype, rows contiguous; not the memory of hidden.
    """
    tokens, size = hidden.shape
    assert hidden.is_contiguous() and out.stride(1) == 1 and (addend is None or addend.stride(1) == 1)
    if not tokens:
        return out
    config = _config(size, two_norms=addend_weight is not None)
    strides = 0 if addend is None else addend.stride(0), out.stride(0)
    _add_norm_kernel[(tokens,)](
        hidden, addend, weight, addend_weight, out, eps, *strides, size, **config.blocks,
        HAS_ADDEND=addend is not None, HAS_ADDEND_NORM=addend_weight is not None,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _config(size: int, *, two_norms: bool) -> Config:
    block = triton.next_power_of_2(size)
    # Values of a row that a thread holds. With 8, two norms are given 40 registers, and some assemblers spill.
    values = 16 if two_norms else 8
    default = Config({"BLOCK": block}, min(max(block // (values * 32), 1), 16), 1)
    return chosen("add_norm", f"{size}" + " two norms" * two_norms, default)


def reference_add_norm(
    hidden: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float, *,
    addend_weight: torch.Tensor | None = None, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    if addend is not None:
        added = addend.float()
        hidden += added if addend_weight is None else F.rms_norm(added, added.shape[1:], addend_weight, eps)
    return out.copy_(F.rms_norm(hidden, hidden.shape[1:], weight, eps))


def serving() -> Iterator[Specialisation]:
    for dtype in ("bf16", "fp16", "fp32"):
        for size in (576, 4096, 8192):
            yield _specialisation(dtype, size, has_addend=True, has_addend_norm=False)
        yield _specialisation(dtype, 3584, has_addend=True, has_addend_norm=True)
        yield _specialisation(dtype, 4096, has_addend=False, has_addend_norm=False)


def _specialisation(dtype: str, size: int, *, has_addend: bool, has_addend_norm: bool) -> Specialisation:
    config = _config(size, two_norms=has_addend_norm)
    signature = {
        "hidden": "*fp32", "weight": "*fp32", "out": f"*{dtype}", "eps": "fp32", "addend_stride": "i32",
        "out_stride": "i32",
    }  # fmt: skip
    constants: dict[str, int | None] = {
        "SIZE": size, **config.blocks, "HAS_ADDEND": has_addend, "HAS_ADDEND_NORM": has_addend_norm,
    }  # fmt: skip
    for name, pointer, given in (("addend", f"*{dtype}", has_addend), ("addend_weight", "*fp32", has_addend_norm)):
        if given:
            signature[name] = pointer
        else:
            constants[name] = None
    words = f"{dtype}, {size} wide" + ", two norms" * has_addend_norm + ", nothing added" * (not has_addend)
    return Specialisation(words, _add_norm_kernel, signature, constants, config.num_warps, config.num_stages)
