"""A test-only model that computes nothing: its next token is a hash of the tokens before it.

Protocol tests are exact with it. The running hash of a sequence lives in the KV pool, at each token's index, and is
read back from there, so a wrong index, a stale row or an overwritten entry shows as another token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backend_lib.checkpoint import HashConfig
from backend_lib.models.batch import ForwardBatch
from backend_lib.models.parallel import ALONE, Ranks

# splitmix64, from Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MASK = (1 << 64) - 1
_PEAK = 10.0  # the next token's logit; all others are 0


class HashModel:
    """A `Decoder` whose KV pool is int64 [num_tokens + 1], the running hash up to and with each token.

    There is nothing to divide: each of the `ranks` computes all of it, and rank 0 gives the logits.
    """

    kv_bytes_per_token = 8

    def __init__(self, config: HashConfig, ranks: Ranks = ALONE) -> None:
        self.vocab_size = config.vocab_size
        self._gives_logits = ranks.rank == 0

    def allocate_kv(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens + 1, dtype=torch.int64)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: torch.Tensor) -> torch.Tensor:
        """Write the running hashes into `kv` and return float32 [L, V]: 10 at the next token, 0 elsewhere. On ranks
        but 0 it is [L, 0]."""
        query_lens = torch.tensor(batch.query_lens)
        sums = _splitmix64((batch.positions << 32) + batch.input_ids).cumsum(0)
        last = query_lens.cumsum(0) - 1
        sums_before = torch.cat(
            [sums.new_zeros(1), sums[last[:-1]]]
        )  # what the cumsum carried over from other sequences
        offsets = _hash_before(batch, kv, query_lens) - sums_before
        hashes = sums + torch.repeat_interleave(offsets, query_lens, output_size=len(sums))
        kv.index_copy_(0, batch.kv_index, hashes)
        if not self._gives_logits:
            return torch.zeros(len(batch.logits_index), 0)
        next_ids = _shift_right(_splitmix64(hashes[batch.logits_index]), 1) % self.vocab_size
        return torch.zeros(len(next_ids), self.vocab_size).scatter_(1, next_ids[:, None], _PEAK)


def expected_next(ids: Sequence[int], vocab_size: int) -> int:
    """The token that follows `ids`, in plain integers: the reference for `HashModel`."""
    total = sum(_splitmix64_int((position << 32) + token) for position, token in enumerate(ids))
    return (_splitmix64_int(total & _MASK) >> 1) % vocab_size


def _hash_before(batch: ForwardBatch, kv: torch.Tensor, query_lens: torch.Tensor) -> torch.Tensor:
    """int64 [S]: the hash of what each sequence held before this step, 0 for one that begins."""
    held = torch.tensor(batch.kv_lens) - query_lens
    index = batch.kv_table[torch.tensor(batch.rows), (held - 1).clamp_(min=0)]
    return torch.where(held > 0, kv[index.long()], 0)


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """int64 in and out, wrapping around as unsigned arithmetic does."""
    x = x + _signed(_GAMMA)
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        x = (x ^ _shift_right(x, shift)) * _signed(multiplier)
    return x ^ _shift_right(x, _SHIFTS[-1])


def _splitmix64_int(x: int) -> int:
    x = (x + _GAMMA) & _MASK
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=False):
        x = ((x ^ (x >> shift)) * multiplier) & _MASK
    return x ^ (x >> _SHIFTS[-1])


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
