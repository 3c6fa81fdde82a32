"""Logits changed before a draw: masks of allowed tokens, and values added to single ones.

L rows of logits · V vocabulary · G masked rows · W words of a mask · C places
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.compiling import Specialisation

MASK_BLOCK = 1024
ADD_BLOCK = 128


@triton.jit(do_not_specialize_on_alignment=["places", "masks"])
def _mask_kernel(logits, places, masks, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks + row.to(tl.int64) * W + token // 32, mask=token < V, other=-1)
    is_banned = (word >> (token % 32)) & 1 == 0
    place = tl.load(places + row)
    tl.store(logits + place * V + token, float("-inf"), mask=is_banned & (token < V))


def apply_masks(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what is not allowed to minus infinity.

    Args:
        logits: float32 [L, V], contiguous.
        places: int64 [G], which of the L rows, all different.
        masks: int32 [G, W], one for each; bit i % 32 of word i // 32 says whether token i is allowed.
    """
    vocab_size, (count, width) = logits.shape[1], masks.shape
    assert logits.is_contiguous() and masks.is_contiguous() and width == triton.cdiv(vocab_size, 32)
    if count:
        grid = count, triton.cdiv(vocab_size, MASK_BLOCK)
        _mask_kernel[grid](logits, places, masks, vocab_size, width, MASK_BLOCK)


def reference_apply_masks(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    tokens = torch.arange(logits.shape[1], device=logits.device)
    allowed = (masks[:, tokens // 32] >> (tokens % 32)) & 1
    logits[places] = logits[places].masked_fill(allowed == 0, -torch.inf)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["at", "values"])
def _add_kernel(logits, at, values, count, V: tl.constexpr, BLOCK: tl.constexpr):
    each = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = each < count
    place = tl.load(at + each, mask=inside, other=0) * V + tl.load(at + count + each, mask=inside, other=0)
    changed = tl.load(logits + place, mask=inside) + tl.load(values + each, mask=inside)
    tl.store(logits + place, changed, mask=inside)


def add_at(logits: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """logits[at[0], at[1]] += values; minus infinity takes a token out.

    Args:
        logits: float32 [L, V], contiguous.
        at: int64 [2, C], contiguous, row of logits and token id, all pairs different.
        values: float32 [C].
    """
    assert logits.is_contiguous() and at.is_contiguous()
    if len(values):
        grid = (triton.cdiv(len(values), ADD_BLOCK),)
        _add_kernel[grid](logits, at, values, len(values), logits.shape[1], ADD_BLOCK)


def reference_add_at(logits: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    logits[at[0], at[1]] += values


def serving() -> Iterator[Specialisation]:
    for vocab_size in (49152, 128256, 151936):
        signature = {"logits": "*fp32", "places": "*i64", "masks": "*i32"}
        constants = {"V": vocab_size, "W": triton.cdiv(vocab_size, 32), "BLOCK": MASK_BLOCK}
        yield Specialisation(
            f"masks, {vocab_size} tokens", _mask_kernel, signature, constants, unaligned=("places", "masks")
        )
    signature = {"logits": "*fp32", "at": "*i64", "values": "*fp32", "count": "i32"}
    constants = {"V": 128256, "BLOCK": ADD_BLOCK}
    yield Specialisation("values", _add_kernel, signature, constants, unaligned=("at", "values"))
