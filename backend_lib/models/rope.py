"""Rotary position embedding (Su et al., "RoFormer", 2021), in the layout that rotates the two halves of a head."""

from __future__ import annotations

import math

import torch

from backend_lib.checkpoint import DecoderConfig, RopeScaling


class Rope:
    """Cosines and sines for positions 0 to `max_position` - 1, float32 [max_position, head_dim] each."""

    def __init__(self, config: DecoderConfig, max_position: int) -> None:
        angles = torch.outer(torch.arange(max_position, dtype=torch.float32), _frequencies(config))
        cos, sin = angles.cos(), angles.sin()
        self.half = config.head_dim // 2
        self.cos = torch.cat([cos, cos], dim=1)
        # (a, b) turns to (a cos - b sin, b cos + a sin): the sign goes with the sine, so that a roll swaps the halves.
        self.signed_sin = torch.cat([-sin, sin], dim=1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of int64 [T] positions, each [T, 1, head_dim]."""
        return self.cos[positions, None], self.signed_sin[positions, None]

    def rotate_(self, heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
        """Rotate float32 [T, heads, head_dim] in place."""
        torch.addcmul(heads * cos, heads.roll(self.half, -1), signed_sin, out=heads)


def _frequencies(config: DecoderConfig) -> torch.Tensor:
    """Radians per position, float32 [head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return _scaled(1.0 / config.rope_theta**exponents, config.rope_scaling)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling | None) -> torch.Tensor:
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        if len(scaling.factors) != len(frequencies):
            raise ValueError(f"{len(scaling.factors)} rotary factors for {len(frequencies)} frequencies")
        return frequencies / torch.tensor(scaling.factors)
    assert scaling.kind == "llama3", scaling.kind
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: waves that fit often into the original context stay, long ones are stretched, in between a blend."""
    waves = frequencies * (scaling.original_max_position / (2 * math.pi))
    kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * ((1 - kept) / scaling.factor + kept)
