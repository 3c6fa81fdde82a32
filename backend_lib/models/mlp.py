"""What stands after attention in a layer: a gated MLP, or several of them behind a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F

from backend_lib.models.linear import Linear

if TYPE_CHECKING:
    from backend_lib.models.decoder import Step

# T tokens in the step · E hidden size · I inner size · X experts · U experts that a token uses

# [T, E] → [T, E]
MLP = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)); `gate_up` gives gate, then up. `activation` is one of
    `backend_lib.checkpoint.decoder_config.ACTIVATIONS`."""

    gate_up: Linear
    down: Linear
    activation: str

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.down(step.gate(self.gate_up(x), self.activation))


class StackedExperts(NamedTuple):
    """Experts of dense weights, side by side as kernels take them.

    Attributes:
        gate_up: [X, 2I, E], gate, then up.
        down: [X, E, I].
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: str


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Each token goes through the `used` experts that the router rates highest (Shazeer et al., 2017).

    Attributes:
        router: float32 [X, E], kept in float32 whatever the other weights are: a rounded score picks another expert.
        renormalised: the weights of the experts used sum to one.
    """

    router: torch.Tensor
    experts: list[GatedMLP] | StackedExperts
    used: int
    renormalised: bool

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        weights, chosen = F.linear(x.float(), self.router).softmax(-1).topk(self.used, dim=-1)  # [T, U] each
        if self.renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return step.mix(x, weights, chosen, self)
