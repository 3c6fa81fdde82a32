"""What the machine allows at most, from its own rates: reading the weights for a token, and multiplying by them.

Attention, norms, sampling and whatever is sent are left out, so nothing can reach a floor in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.rivals.peer import Weights
from benchmarks.rivals.reference import Rates


@dataclass(frozen=True)
class Shape:
    """Weights that a token is multiplied by: in the layers, and in the head, which is read for output tokens only."""

    layer_weights: int
    head_weights: int

    @classmethod
    def of_decoder(
        cls, *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int
    ) -> Shape:
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        return cls(layers * (attention + 3 * hidden * intermediate), hidden * vocab)

    def bytes_per_step(self, weights: Weights) -> float | None:
        """All weights once; None where their size is not known."""
        if weights.layer_bits is None or weights.head_bits is None:
            return None
        return (self.layer_weights * weights.layer_bits + self.head_weights * weights.head_bits) / 8

    @property
    def flop_per_output(self) -> int:
        return 2 * (self.layer_weights + self.head_weights)

    @property
    def flop_per_input(self) -> int:
        return 2 * self.layer_weights


class Lengths(NamedTuple):
    """Tokens of each request."""

    prompt: int
    output: int


class Floor(NamedTuple):
    """For one weight format and one matmul rate. Tokens a second at most."""

    decode: float | None  # one sequence, reading the weights for each token
    prefill: float
    waves: dict[int, float | None]  # output tokens, prefill included, by concurrency


def floor(shape: Shape, weights: Weights, rates: Rates, operands: str, waves: list[int], lengths: Lengths) -> Floor:
    """`operands`: whose rate, a key of `rates.matmul_gflop_s`."""
    flop_s, num_bytes = rates.matmul_gflop_s[operands] * 1e9, shape.bytes_per_step(weights)
    read = None if num_bytes is None else num_bytes / (rates.read_gb_s * 1e9)
    return Floor(
        decode=1 / read if read else None,
        prefill=flop_s / shape.flop_per_input,
        waves={count: _wave(shape, read, flop_s, count, lengths) for count in waves},
    )


def _wave(shape: Shape, read: float | None, flop_s: float, count: int, lengths: Lengths) -> float | None:
    """A step can read while it multiplies, so the slower of the two counts; the first token comes with the prefill."""
    if read is None:
        return None
    prefill = max(read, count * lengths.prompt * shape.flop_per_input / flop_s)
    step = max(read, count * shape.flop_per_output / flop_s)
    return count * lengths.output / (prefill + (lengths.output - 1) * step)
