"""The draw: of each row of logits the best token, or the best with noise on top among what the filters leave.

The noise is that of `kernels.philox`, bit for bit, so that what is drawn is a pure function of logits, seed, sequence
and position, on a GPU as on a CPU.

L rows of logits · R rows of sequences · V vocabulary · B blocks of it
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.compiling import Specialisation
from kernels.filters import Params, find_cuts, key_of, load_logits, reference_find_cuts, reference_keys
from kernels.philox import gumbel_noise
from kernels.tuning import Config, chosen

_SMALLEST_BLOCK = 256


@triton.jit
def noise_of(seed, sequence, position, start, BLOCK: tl.constexpr):
    """float32 [BLOCK], of the tokens from `start` on, a multiple of 4. A Philox block has the words of four tokens."""
    counter = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zeros = tl.zeros_like(counter)
    low, high = position.to(tl.uint32) + zeros, (position >> 32).to(tl.uint32) + zeros
    word_0, word_1, word_2, word_3 = tl.philox(seed, counter, low, sequence.to(tl.uint32) + zeros, high)
    word = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
    uniform = (word.to(tl.float64) + 0.5) * (1.0 / (1 << 32))
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _first_of_best(value, score, token):
    """The largest value, and of equals the largest score, and of equals the first token. All three are reduced."""
    best = tl.max(value, 0)
    best_score = tl.max(tl.where(value == best, score, float("-inf")), 0)
    is_best = (value == best) & (score == best_score)
    return best, best_score, tl.min(tl.where(is_best, token, 0x7FFFFFFF), 0)


# The parameters are rows of a table, wherever these begin.
@triton.jit(
    do_not_specialize_on_alignment=[
        "rows", "positions", "temperatures", "top_ks", "top_ps", "seeds", "sequence_indices", "last_ids", "best_scores",
    ]
)  # fmt: skip
def _blocks_kernel(
    logits, rows, positions, temperatures, top_ks, top_ps, seeds, sequence_indices, cut_keys, last_ids,
    best_values, best_scores, best_ids, V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best of one block of the vocabulary."""
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + place)
    temperature = tl.load(temperatures + row)
    token = block * BLOCK + tl.arange(0, BLOCK)
    value = load_logits(logits + place * V, token, V)
    score = tl.zeros_like(value)
    if temperature > 0:
        value = tl.div_rn(value, temperature)
        key, cut_key = key_of(value), tl.load(cut_keys + place)
        is_kept = (key > cut_key) | ((key == cut_key) & (token <= tl.load(last_ids + place)))
        value = tl.where(is_kept, value, float("-inf"))
        if (tl.load(top_ks + row) > 0) | (tl.load(top_ps + row) < 1):
            score = value  # of equals in the end the CPU takes the first in the order of the filters
        if tl.max(value, 0) > float("-inf"):
            seed, sequence = tl.load(seeds + row), tl.load(sequence_indices + row)
            value += noise_of(seed, sequence, tl.load(positions + place), block * BLOCK, BLOCK)
    best, best_score, best_id = _first_of_best(value, score, token)
    tl.store(best_values + place * BLOCKS + block, best)
    tl.store(best_scores + place * BLOCKS + block, best_score)
    tl.store(best_ids + place * BLOCKS + block, best_id)


@triton.jit(do_not_specialize_on_alignment=["best_scores", "out"])
def _row_kernel(best_values, best_scores, best_ids, out, BLOCKS: tl.constexpr, WIDTH: tl.constexpr):
    """The best of a row's blocks."""
    place, block = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = block < BLOCKS
    value = tl.load(best_values + place * BLOCKS + block, mask=inside, other=float("-inf"))
    score = tl.load(best_scores + place * BLOCKS + block, mask=inside, other=float("-inf"))
    token = tl.load(best_ids + place * BLOCKS + block, mask=inside, other=0x7FFFFFFF)
    tl.store(out + place, _first_of_best(value, score, token)[2].to(tl.int64))


class DrawWorkspace:
    """What stands between the launches of a draw."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        blocks = triton.cdiv(vocab_size, _SMALLEST_BLOCK)
        self.cut_keys, self.last_ids = torch.zeros((2, max_rows), dtype=torch.int32, device=device)
        self.best_values, self.best_scores = torch.zeros((2, max_rows, blocks), device=device)
        self.best_ids = torch.zeros((max_rows, blocks), dtype=torch.int32, device=device)


def draw(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: Params, workspace: DrawWorkspace, *,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Token ids, in three launches. Logits are not changed.

    NaN counts as minus infinity. Minus infinity is drawn only if there is nothing else, and then it is token 0.

    Args:
        logits: float32 [L, V], contiguous.
        rows: int64 [L], contiguous: the row of each.
        positions: int64 [L], contiguous: place of the drawn token in its sequence, at least 0.
        workspace: for at least L rows of V; one draw at a time.
        out: int64 [L], contiguous.
    """
    (count, vocab_size), config = logits.shape, _config(logits.shape[1])
    assert logits.is_contiguous() and rows.stride(0) == positions.stride(0) == out.stride(0) == 1
    if not count:
        return
    cuts, found = (workspace.cut_keys, workspace.last_ids), (workspace.best_values, workspace.best_scores)
    blocks = triton.cdiv(vocab_size, config.blocks["BLOCK"])
    assert count * blocks <= workspace.best_ids.numel() and count <= len(workspace.last_ids)
    find_cuts(logits, rows, params, cut_keys=cuts[0], last_ids=cuts[1])
    _blocks_kernel[(count, blocks)](
        logits, rows, positions, params.temperature, params.top_k, params.top_p, params.seed, params.sequence_index,
        *cuts, *found, workspace.best_ids, vocab_size, blocks, **config.blocks,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    _row_kernel[(count,)](*found, workspace.best_ids, out, blocks, triton.next_power_of_2(blocks), num_warps=1)


def _config(vocab_size: int) -> Config:
    return chosen("draw", f"{vocab_size}", Config({"BLOCK": 1024}, 4, 1))


def reference_draw(
    logits: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, params: Params, workspace: DrawWorkspace, *,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """From the definition. Uses the workspace's cuts only."""
    vocab_size, cuts = logits.shape[1], (workspace.cut_keys, workspace.last_ids)
    reference_find_cuts(logits, rows, params, cut_keys=cuts[0], last_ids=cuts[1])
    for place, row in enumerate(rows.tolist()):
        scores = logits[place].nan_to_num(-torch.inf, torch.inf, -torch.inf)
        values, tie_breaker = scores, torch.zeros_like(scores)
        if params.temperature[row] > 0:
            scores = scores / params.temperature[row]
            key, is_early = reference_keys(scores), torch.arange(vocab_size) <= cuts[1][place]
            scores = scores.masked_fill(~((key > cuts[0][place]) | ((key == cuts[0][place]) & is_early)), -torch.inf)
            stream = params.seed[row, None], params.sequence_index[row, None], positions[place, None]
            values = scores + gumbel_noise(*stream, vocab_size)[0]
            tie_breaker = scores if params.top_k[row] > 0 or params.top_p[row] < 1 else tie_breaker
        out[place] = tie_breaker.masked_fill(values < values.max(), -torch.inf).argmax()


def serving() -> Iterator[Specialisation]:
    floats = ("logits", "temperatures", "top_ps", "best_values", "best_scores")
    longs = ("rows", "positions", "top_ks", "seeds", "sequence_indices")
    signature = dict.fromkeys(floats, "*fp32") | dict.fromkeys(longs, "*i64")
    signature |= dict.fromkeys(("cut_keys", "last_ids", "best_ids"), "*i32")
    for vocab_size in (49152, 128256, 151936):
        config = _config(vocab_size)
        blocks = triton.cdiv(vocab_size, config.blocks["BLOCK"])
        yield Specialisation(
            f"blocks, {vocab_size} tokens", _blocks_kernel, signature,
            {"V": vocab_size, "BLOCKS": blocks, **config.blocks}, config.num_warps, config.num_stages,
        )  # fmt: skip
        signature_of_row = {"best_values": "*fp32", "best_scores": "*fp32", "best_ids": "*i32", "out": "*i64"}
        constants = {"BLOCKS": blocks, "WIDTH": triton.next_power_of_2(blocks)}
        yield Specialisation(f"rows, {vocab_size} tokens", _row_kernel, signature_of_row, constants, 1)
