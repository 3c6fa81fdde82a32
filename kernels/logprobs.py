"""The log-probability and the rank of one token of each row of logits.

L rows of logits · V vocabulary · B parts of a row
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.compiling import Specialisation

BLOCK = 4096


@triton.jit(do_not_specialize_on_alignment=["logits", "token_ids", "sums"])
def _part_kernel(logits, token_ids, largest, sums, better, V: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of one part of a row: its largest logit, the sum of exponentials over that, and how many reach the token's."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * V + token, mask=token < V, other=float("-inf"))
    chosen = tl.load(logits + row * V + tl.load(token_ids + row))
    most = tl.max(values, 0)
    # Where nothing is finite the sum is 0, whatever is taken off.
    weights = tl.exp(values - tl.where(most == float("-inf"), 0.0, most))
    tl.store(largest + row * PARTS + part, most)
    tl.store(sums + row * PARTS + part, tl.sum(weights, 0))
    tl.store(better + row * PARTS + part, tl.sum(((values >= chosen) & (token < V)).to(tl.int32), 0))


@triton.jit(do_not_specialize_on_alignment=["logits", "token_ids", "sums", "chosen", "log_sum_exp", "ranks"])
def _whole_kernel(
    logits, token_ids, largest, sums, better, chosen, log_sum_exp, ranks,
    V: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, WIDTH)
    inside = part < PARTS
    most = tl.load(largest + row * PARTS + part, mask=inside, other=float("-inf"))
    whole_most = tl.max(most, 0)
    scale = tl.where(most == float("-inf"), 0.0, tl.exp(most - whole_most))
    total = tl.sum(tl.load(sums + row * PARTS + part, mask=inside, other=0.0) * scale, 0)
    whole = whole_most + tl.log(total)
    tl.store(chosen + row, tl.load(logits + row * V + tl.load(token_ids + row)) - whole)
    tl.store(log_sum_exp + row, whole)
    tl.store(ranks + row, tl.sum(tl.load(better + row * PARTS + part, mask=inside, other=0), 0).to(tl.int64))


def logprob_stats(
    logits: torch.Tensor, token_ids: torch.Tensor, *, chosen: torch.Tensor, log_sum_exp: torch.Tensor,
    ranks: torch.Tensor,
) -> None:  # fmt: skip
    """Log-probabilities and ranks of tokens. A rank counts from 1 and takes equals for one better.

    Two launches, and 12 bytes of workspace for each part of a row, which are allocated here.

    Args:
        logits: float32 [L, V], contiguous, at least one of a row finite.
        token_ids: int64 [L].
        chosen, log_sum_exp: float32 [L], contiguous.
        ranks: int64 [L], contiguous.
    """
    (rows, vocab_size), parts = logits.shape, triton.cdiv(logits.shape[1], BLOCK)
    assert logits.is_contiguous()
    if not rows:
        return
    largest, sums = torch.empty((2, rows, parts), device=logits.device)
    better = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _part_kernel[(rows, parts)](logits, token_ids, largest, sums, better, vocab_size, parts, BLOCK, num_warps=8)
    _whole_kernel[(rows,)](
        logits, token_ids, largest, sums, better, chosen, log_sum_exp, ranks, vocab_size, parts,
        triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip


def reference_logprob_stats(
    logits: torch.Tensor, token_ids: torch.Tensor, *, chosen: torch.Tensor, log_sum_exp: torch.Tensor,
    ranks: torch.Tensor,
) -> None:  # fmt: skip
    score = logits.gather(1, token_ids[:, None])
    log_sum_exp.copy_(logits.double().logsumexp(dim=1))
    chosen.copy_(score[:, 0].double() - logits.double().logsumexp(dim=1))
    ranks.copy_((logits >= score).sum(dim=1))


def serving() -> Iterator[Specialisation]:
    common = {"logits": "*fp32", "token_ids": "*i64", "largest": "*fp32", "sums": "*fp32", "better": "*i32"}
    results = {"chosen": "*fp32", "log_sum_exp": "*fp32", "ranks": "*i64"}
    for vocab_size in (49152, 128256, 151936):
        parts = triton.cdiv(vocab_size, BLOCK)
        constants = {"V": vocab_size, "PARTS": parts}
        yield Specialisation(
            f"parts, {vocab_size} tokens", _part_kernel, common, constants | {"BLOCK": BLOCK}, 8,
            unaligned=("logits", "token_ids", "sums"),
        )  # fmt: skip
        yield Specialisation(
            f"whole, {vocab_size} tokens", _whole_kernel, common | results,
            constants | {"WIDTH": triton.next_power_of_2(parts)}, 1, unaligned=("logits", "token_ids", "sums"),
        )  # fmt: skip
