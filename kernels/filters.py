"""What top-k, min-p and top-p leave of a row of logits, without sorting it: the worst token that is kept.

Tokens are ordered by score, which is the logit divided by the temperature, and equals by rising id. Each filter keeps
the beginning of that order, so all of them together are one pair: a token is kept if its score's key is above
`cut_key`, or equal to it and its id at most `last_id`. A score's key is an integer in the order of the scores. NaN
counts as minus infinity.

L rows of logits · R rows of sequences · V vocabulary · P pivots of a pass
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import triton
import triton.language as tl

from kernels.compiling import Specialisation
from kernels.tuning import Config, chosen

_LEAST = tl.constexpr(-(1 << 31))  # below every key
_MOST = tl.constexpr((1 << 31) - 1)
_KEY_OF_MINUS_INFINITY = tl.constexpr(-2139095041)


class Params(Protocol):
    """The sampling parameters of every row, [R] each."""

    @property
    def temperature(self) -> torch.Tensor:
        """float32, 0 is greedy."""

    @property
    def top_p(self) -> torch.Tensor:
        """float32, 1 is all."""

    @property
    def log_min_p(self) -> torch.Tensor:
        """float32, minus infinity is none."""

    @property
    def top_k(self) -> torch.Tensor:
        """int64, 0 is all."""

    @property
    def seed(self) -> torch.Tensor:
        """int64, any 64 bits."""

    @property
    def sequence_index(self) -> torch.Tensor:
        """int64, at least 0."""


@triton.jit
def load_logits(logits, token, V: tl.constexpr):
    """float32, minus infinity for NaN and beyond the vocabulary."""
    logit = tl.load(logits + token, mask=token < V, other=float("-inf"))
    return tl.where(logit == logit, logit, float("-inf"))


@triton.jit
def key_of(score):
    """int32 in the order of the scores: a float's bits have it once those of negatives are turned round."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(key, best):
    """Probability of a score, by its key, as a multiple of the best one's."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    score = bits.to(tl.float32, bitcast=True)
    return tl.where(score == best, 1.0, tl.exp(score - best))  # infinity less infinity is no number


@triton.jit
def _load_keys(logits, token, temperature, V: tl.constexpr):
    """Beyond the vocabulary it is the least integer."""
    key = key_of(tl.div_rn(load_logits(logits, token, V), temperature))
    return tl.where(token < V, key, _LEAST)


@triton.jit
def _best_logit(logits, V: tl.constexpr, BLOCK: tl.constexpr):
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in tl.range(0, V, BLOCK):
        best = tl.maximum(best, load_logits(logits, start + tl.arange(0, BLOCK), V))
    return tl.max(best, 0)


@triton.jit
def _mass(logits, temperature, best, floor, V: tl.constexpr, BLOCK: tl.constexpr):
    """Of all that is above a key, and how many have just that key."""
    mass, equal = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, V, BLOCK):
        key = _load_keys(logits, start + tl.arange(0, BLOCK), temperature, V)
        mass += tl.where(key > floor, _weight(key, best), 0.0)
        equal += (key == floor).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(equal, 0)


@triton.jit
def _search(
    logits, temperature, best, floor, target, BY_MASS: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """The worst token that has less than `target` before it, counted or weighed: its key, what all with a better key
    amount to, and how many have this key. `floor` is the least key that is asked for.

    The key lies in (below, top]. A pass looks at pivots inside, and at which keys there are at all. It is found when
    there is one only. Sums of fewer of the same terms in the same order are no larger, also when rounded, so what the
    pivots tell is in order.
    """
    below, top = floor.to(tl.int64) - 1, key_of(best).to(tl.int64)
    least, most, better, equal = below, top, 0.0, 0
    step = (tl.arange(0, PIVOTS) + 1)[None, :]
    while least < most:
        pivot = below + (top - below) * step // (PIVOTS + 1)
        amounts = tl.zeros((BLOCK, PIVOTS), tl.float32)
        lows, highs = tl.full((BLOCK, 1), _MOST, tl.int32), tl.full((BLOCK, 1), _LEAST, tl.int32)
        inside = tl.zeros((BLOCK, 1), tl.int32)
        pivot_key, below_key, top_key = pivot.to(tl.int32), below.to(tl.int32), top.to(tl.int32)
        for start in tl.range(0, V, BLOCK):
            key = _load_keys(logits, start + tl.arange(0, BLOCK)[:, None], temperature, V)
            weight = _weight(key, best) if BY_MASS else 1.0
            amounts += tl.where(key > pivot_key, weight, 0.0)
            is_inside = (key > below_key) & (key <= top_key)
            lows = tl.minimum(lows, tl.where(is_inside, key, _MOST))
            highs = tl.maximum(highs, tl.where(is_inside, key, _LEAST))
            inside += is_inside.to(tl.int32)
        amount = tl.sum(amounts, 0)[None, :]
        least, most = tl.min(lows).to(tl.int64), tl.max(highs).to(tl.int64)
        equal = tl.sum(inside)
        is_below = (amount >= target) | (pivot < least)
        better = tl.maximum(better, tl.max(tl.where(is_below, 0.0, amount)))
        below = tl.maximum(tl.max(tl.where(is_below, pivot, below)), least - 1)
        top = tl.minimum(tl.min(tl.where(is_below, top, pivot)), most)
    return least.to(tl.int32), better, equal


@triton.jit
def _last_of_equals(logits, temperature, key, count, V: tl.constexpr, BLOCK: tl.constexpr):
    """The id of the `count`-th token with a key, V if there are not so many."""
    start, last = 0, V
    while (start < V) & (last == V):
        token = start + tl.arange(0, BLOCK)
        is_equal = (_load_keys(logits, token, temperature, V) == key).to(tl.int32)
        is_last = (is_equal == 1) & (tl.cumsum(is_equal, 0) == count)
        last = tl.min(tl.where(is_last, token, V), 0)
        count -= tl.sum(is_equal, 0)
        start += BLOCK
    return last


@triton.jit
def _cut(logits, temperature, top_k, top_p, log_min_p, V: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """Key and id of the worst token that is kept. Of those at the floor, the first `kept` are."""
    best = tl.div_rn(_best_logit(logits, V, BLOCK), temperature)
    floor, kept = tl.full((), _KEY_OF_MINUS_INFINITY, tl.int32), V
    if (top_k > 0) & (top_k < V):
        key, better, equal = _search(logits, temperature, best, floor, top_k.to(tl.float32), False, V, BLOCK, PIVOTS)
        floor, kept = key, top_k.to(tl.int32) - better.to(tl.int32)
        kept = tl.where(kept >= equal, V, kept)
    if log_min_p > float("-inf"):
        least = key_of(best + log_min_p)
        kept = tl.where(least > floor, V, kept)
        floor = tl.maximum(floor, least)
    if top_p < 1:
        mass, equal = _mass(logits, temperature, best, floor, V, BLOCK)
        target = top_p * (mass + tl.minimum(equal, kept).to(tl.float32) * _weight(floor, best))
        key, better, equal = _search(logits, temperature, best, floor, target, True, V, BLOCK, PIVOTS)
        # As many of the equals as have less than the target before them.
        wanted = tl.ceil((target - better) / _weight(key, best))
        wanted = tl.where(wanted < equal, tl.maximum(wanted, 1.0).to(tl.int32), V)  # not if it is no number
        kept = tl.where(key == floor, tl.minimum(wanted, kept), wanted)
        floor = key
    last = V
    if kept < V:
        last = _last_of_equals(logits, temperature, floor, kept, V, BLOCK)
    return floor, last


@triton.jit(do_not_specialize_on_alignment=["rows", "temperatures", "top_ks", "top_ps", "log_min_ps", "last_ids"])
def _cut_kernel(
    logits, rows, temperatures, top_ks, top_ps, log_min_ps, cut_keys, last_ids,
    V: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    top_p, log_min_p = tl.load(top_ps + row), tl.load(log_min_ps + row)
    cut_key, last_id = _LEAST, V
    has_filters = ((top_k > 0) & (top_k < V)) | (top_p < 1) | (log_min_p > float("-inf"))
    if (temperature > 0) & has_filters:
        cut_key, last_id = _cut(logits + place * V, temperature, top_k, top_p, log_min_p, V, BLOCK, PIVOTS)
    tl.store(cut_keys + place, cut_key)
    tl.store(last_ids + place, last_id)


def find_cuts(
    logits: torch.Tensor, rows: torch.Tensor, params: Params, *, cut_keys: torch.Tensor, last_ids: torch.Tensor
) -> None:
    """The worst kept token of each row of logits. A row without filters, or a greedy one, keeps all.

    Args:
        logits: float32 [L, V], contiguous.
        rows: int64 [L], contiguous: the row of each.
        cut_keys, last_ids: int32 [>= L], contiguous.
    """
    config = _config(logits.shape[1])
    _cut_kernel[(len(logits),)](
        logits, rows, params.temperature, params.top_k, params.top_p, params.log_min_p, cut_keys, last_ids,
        logits.shape[1], **config.blocks, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _config(vocab_size: int) -> Config:
    return chosen("filters", f"{vocab_size}", Config({"BLOCK": 2048, "PIVOTS": 8}, 16, 2))


def reference_find_cuts(
    logits: torch.Tensor, rows: torch.Tensor, params: Params, *, cut_keys: torch.Tensor, last_ids: torch.Tensor
) -> None:
    """By sorting."""
    for place, row in enumerate(rows.tolist()):
        temperature, vocab_size = params.temperature[row], logits.shape[1]
        cut_keys[place], last_ids[place] = -(1 << 31), vocab_size
        if temperature > 0:
            scores = logits[place].nan_to_num(-torch.inf, torch.inf, -torch.inf) / temperature
            order = _kept(scores, *(each[row].item() for each in (params.top_k, params.top_p, params.log_min_p)))
            if len(order) < vocab_size:
                cut_keys[place], last_ids[place] = reference_keys(scores)[order[-1]], order[-1]


def reference_keys(scores: torch.Tensor) -> torch.Tensor:
    bits = (scores + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _kept(scores: torch.Tensor, top_k: float, top_p: float, log_min_p: float) -> torch.Tensor:
    """Token ids, best first."""
    order = scores.sort(descending=True, stable=True).indices
    order = order[: int(top_k) or None]
    order = order[~(scores[order] < scores[order[0]] + log_min_p)]
    mass = reference_masses(scores[order])
    return order[: max(1, int((mass.cumsum(0) - mass < top_p).sum()))] if top_p < 1 else order


def reference_masses(scores: torch.Tensor) -> torch.Tensor:
    """float64, the softmax; infinite scores share it."""
    best = scores.max()
    weights = (scores.double() - best).exp().masked_fill(scores == best, 1)
    return weights / weights.sum()


def serving() -> Iterator[Specialisation]:
    floats = dict.fromkeys(("logits", "temperatures", "top_ps", "log_min_ps"), "*fp32")
    signature = floats | {"rows": "*i64", "top_ks": "*i64", "cut_keys": "*i32", "last_ids": "*i32"}
    for vocab_size in (49152, 128256, 151936):
        config = _config(vocab_size)
        constants = {"V": vocab_size, **config.blocks}
        yield Specialisation(
            f"{vocab_size} tokens", _cut_kernel, signature, constants, config.num_warps, config.num_stages
        )
