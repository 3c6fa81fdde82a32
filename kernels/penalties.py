"""Penalties for tokens that are there already, and the counters that say which.

L rows of logits · P of them with penalties · R rows of sequences · V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.compiling import Specialisation

BLOCK = 1024
COUNT_BLOCK = 128


@triton.jit(do_not_specialize_on_alignment=["places", "rows"])
def _penalise_kernel(logits, places, rows, factors, counts, in_prompt, V: tl.constexpr, BLOCK: tl.constexpr):
    place, row = tl.load(places + tl.program_id(0)), tl.load(rows + tl.program_id(0))
    repetition, presence = tl.load(factors + 3 * row), tl.load(factors + 3 * row + 1)
    frequency = tl.load(factors + 3 * row + 2)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    score = tl.load(logits + place * V + token, mask=inside, other=0.0)
    count = tl.load(counts + row * V + token, mask=inside, other=0)
    has_come = count > 0
    factor = tl.where(has_come | (tl.load(in_prompt + row * V + token, mask=inside, other=0) != 0), repetition, 1.0)
    score = tl.where(score > 0, tl.div_rn(score, factor), score * factor)
    # In float64 the product is exact, and rounded once: in float32 a compiler would fuse it with the subtraction, and
    # the score would not be the one that the CPU has.
    taken = (frequency.to(tl.float64) * count.to(tl.float64)).to(tl.float32)
    score = score - taken - tl.where(has_come, presence, 0.0)
    tl.store(logits + place * V + token, score, mask=inside)


def apply_penalties(
    logits: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor, counts: torch.Tensor,
    in_prompt: torch.Tensor,
) -> None:  # fmt: skip
    """Divide or multiply by the repetition penalty what has come in prompt or output, and take from the output's own
    tokens the presence penalty, and the frequency penalty for each time.

    Args:
        logits: float32 [L, V], contiguous.
        places: int64 [P], which of the L, all different.
        rows: int64 [P], the row of each.
        factors: float32 [R, 3], repetition, presence and frequency penalty.
        counts: int32 [R, V], how often a token is in the output.
        in_prompt: bool [R, V].
    """
    vocab_size = logits.shape[1]
    assert all(each.is_contiguous() for each in (logits, places, rows, factors, counts, in_prompt))
    if len(places):
        grid = len(places), triton.cdiv(vocab_size, BLOCK)
        _penalise_kernel[grid](logits, places, rows, factors, counts, in_prompt, vocab_size, BLOCK)


def reference_apply_penalties(
    logits: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, factors: torch.Tensor, counts: torch.Tensor,
    in_prompt: torch.Tensor,
) -> None:  # fmt: skip
    for place, row in zip(places.tolist(), rows.tolist(), strict=True):
        repetition, presence, frequency = factors[row]
        has_come = counts[row] > 0
        factor = torch.where(has_come | in_prompt[row], repetition, 1.0)
        score = torch.where(logits[place] > 0, logits[place] / factor, logits[place] * factor)
        logits[place] = score - frequency * counts[row] - presence * has_come


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["token_ids", "rows"])
def _count_kernel(token_ids, rows, counts, count, V: tl.constexpr, BLOCK: tl.constexpr):
    each = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = each < count
    row, token = tl.load(rows + each, mask=inside, other=0), tl.load(token_ids + each, mask=inside, other=0)
    place = counts + row * V + token
    tl.store(place, tl.load(place, mask=inside, other=0) + 1, mask=inside)


def count_tokens(token_ids: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> None:
    """counts[rows, token_ids] += 1.

    Args:
        token_ids, rows: int64 [P], contiguous; rows all different.
        counts: int32 [R, V], contiguous.
    """
    if len(rows):
        grid = (triton.cdiv(len(rows), COUNT_BLOCK),)
        _count_kernel[grid](token_ids, rows, counts, len(rows), counts.shape[1], COUNT_BLOCK)


def reference_count_tokens(token_ids: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor) -> None:
    counts[rows, token_ids] += 1


def serving() -> Iterator[Specialisation]:
    unaligned = ("token_ids", "rows", "places")
    for vocab_size in (49152, 128256, 151936):
        signature = {
            "logits": "*fp32", "places": "*i64", "rows": "*i64", "factors": "*fp32", "counts": "*i32",
            "in_prompt": "*i1",
        }  # fmt: skip
        constants = {"V": vocab_size, "BLOCK": BLOCK}
        yield Specialisation(f"{vocab_size} tokens", _penalise_kernel, signature, constants, unaligned=unaligned[1:])
    signature = {"token_ids": "*i64", "rows": "*i64", "counts": "*i32", "count": "i32"}
    constants = {"V": 128256, "BLOCK": COUNT_BLOCK}
    yield Specialisation("counters", _count_kernel, signature, constants, unaligned=unaligned[:2])
