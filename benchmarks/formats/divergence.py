"""How far one decoder's logits are from another's, and what each makes of the tokens that really come."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

# W predicted positions of a window · V vocabulary

_ROWS = 128  # positions at a time: temporaries of some 25 MB each
_STRIDE = 101  # every so many logits are kept for the percentile; a prime, so that all of the vocabulary has its turn


class Quality(NamedTuple):
    """Against the reference: `perplexity_rise` and its standard error are shares, not percent."""

    tokens: int
    perplexity: float
    perplexity_rise: float
    rise_error: float
    mean_difference: float
    p99_difference: float
    divergence: float
    same_argmax: float


@dataclass
class Tally:
    """Sums over windows.

    Attributes:
        losses: minus the log-probability of each token that came, by this decoder.
        reference_losses: the same by the reference.
    """

    losses: list[np.ndarray] = field(default_factory=list)
    reference_losses: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    difference: float = 0.0
    divergence: float = 0.0
    same: int = 0
    logits: int = 0

    def add(self, logits: torch.Tensor, reference: torch.Tensor, following: torch.Tensor) -> None:
        """float32 [W, V] both, and int64 [W], the tokens that came."""
        parts = (each.split(_ROWS) for each in (logits, reference, following))
        for part in zip(*parts, strict=True):
            self._add(*part)

    def _add(self, logits: torch.Tensor, reference: torch.Tensor, following: torch.Tensor) -> None:
        difference = (logits - reference).abs()
        self.difference += difference.sum(dtype=torch.float64).item()
        self.logits += difference.numel()
        self.sampled.append(difference.flatten()[::_STRIDE].numpy().copy())
        self.same += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        own, other = logits.log_softmax(-1), reference.log_softmax(-1)
        self.divergence += (other.exp() * (other - own)).sum(dtype=torch.float64).item()
        for losses, each in ((self.losses, own), (self.reference_losses, other)):
            losses.append(-each.gather(1, following[:, None])[:, 0].double().numpy())

    def quality(self) -> Quality:
        own, other = np.concatenate(self.losses), np.concatenate(self.reference_losses)
        rise = own - other
        return Quality(
            tokens=len(own),
            perplexity=math.exp(own.mean()),
            perplexity_rise=math.expm1(rise.mean()),
            rise_error=float(rise.std() / math.sqrt(len(rise))),
            mean_difference=self.difference / self.logits,
            p99_difference=float(np.percentile(np.concatenate(self.sampled), 99)),
            divergence=self.divergence / len(own),
            same_argmax=self.same / len(own),
        )
