"""Rotary position embedding (Su et al., "RoFormer", 2021), in the layout that rotates the two halves of a head."""

from __future__ import annotations

import math

import torch

from backend_lib.checkpoint import RopeConfig, RopeScaling

# T tokens in the step · d entries of a head that are rotated


class Rope:
    """Cosines and sines by position, worked out as they are needed: a table of a long context takes 100 MB and more.

    Args:
        max_position: as far as sequences may grow. One set of frequencies serves all lengths, so that what is in the
            KV cache stays true; longrope's is chosen by this.
    """

    def __init__(self, config: RopeConfig, max_position: int, device: torch.device | None = None) -> None:
        self.half = config.dim // 2
        self.frequencies = _frequencies(config, max_position).to(device or "cpu")
        self.magnitude = config.scaling.attention_factor if config.scaling else 1.0

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and signed sine of int64 [T] positions, float32 [T, 1, d] each.

        (a, b) turns to (a cos - b sin, b cos + a sin): the sign goes with the sine, so that a roll swaps the halves.
        """
        cos, sin = (half[:, None] for half in self.halves(positions))
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def halves(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of int64 [T] positions, float32 [T, d / 2] each."""
        angles = positions[:, None].float() * self.frequencies
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude

    def rotate_(self, heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
        """Rotate the first d entries of float32 [T, heads, head_dim] in place."""
        rotated = heads[..., : 2 * self.half]
        torch.addcmul(rotated * cos, rotated.roll(self.half, -1), signed_sin, out=rotated)


def _frequencies(config: RopeConfig, max_position: int) -> torch.Tensor:
    """Radians per position, float32 [d / 2]."""
    exponents = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
    wavelengths = config.theta**exponents  # in radians, over 2 pi
    frequencies = 1.0 / wavelengths
    scaling = config.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return _stretched(wavelengths, scaling.factors)
    if scaling.kind == "longrope":
        is_long = max_position > scaling.original_max_position
        return _stretched(wavelengths, scaling.long_factors if is_long else scaling.factors)
    if scaling.kind == "yarn":
        return _yarn(frequencies, config, scaling)
    assert scaling.kind == "llama3", scaling.kind
    return _llama3(frequencies, scaling)


def _stretched(wavelengths: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
    if len(factors) != len(wavelengths):
        raise ValueError(f"{len(factors)} rotary factors for {len(wavelengths)} frequencies")
    return 1.0 / (torch.tensor(factors) * wavelengths)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: waves that fit often into the original context stay, long ones are stretched, in between a blend."""
    waves = frequencies * (scaling.original_max_position / (2 * math.pi))
    kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _blend(frequencies, scaling.factor, kept.clamp(0, 1))


def _yarn(frequencies: torch.Tensor, config: RopeConfig, scaling: RopeScaling) -> torch.Tensor:
    """Peng et al., "YaRN", 2023: dimensions that turn often stay, slow ones are stretched, along a linear ramp."""
    low, high = (_dimension_of(turns, config, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dim - 1)
    ramp = (torch.arange(len(frequencies)) - low) / max(high - low, 0.001)
    return _blend(frequencies, scaling.factor, 1 - ramp.clamp(0, 1))


def _dimension_of(turns: float, config: RopeConfig, scaling: RopeScaling) -> float:
    """Which frequency makes `turns` turns over the original context, as a real number."""
    wavelength = scaling.original_max_position / (turns * 2 * math.pi)
    return config.dim * math.log(wavelength) / (2 * math.log(config.theta))


def _blend(frequencies: torch.Tensor, factor: float, kept: torch.Tensor) -> torch.Tensor:
    """`kept` 1 leaves a frequency, 0 divides it by `factor`."""
    return frequencies * ((1 - kept) / factor + kept)
