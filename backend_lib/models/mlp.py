"""What stands after attention in a layer: a gated MLP, or several of them behind a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from backend_lib.models.linear import Linear

# T tokens in the step · E hidden size · X experts · U experts that a token uses

# float32 [T, E] → float32 [T, E]
MLP = Callable[[torch.Tensor], torch.Tensor]
Activation = Callable[[torch.Tensor], torch.Tensor]

# By the names of `backend_lib.checkpoint.decoder_config.ACTIVATIONS`.
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)); `gate_up` gives gate, then up."""

    gate_up: Linear
    down: Linear
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate).mul_(up))


@dataclass(frozen=True, kw_only=True)
class MixtureOfExperts:
    """Each token goes through the `used` experts that the router rates highest (Shazeer et al., 2017).

    Attributes:
        router: float32 [X, E], kept in float32 whatever the other weights are: a rounded score picks another expert.
        renormalised: the weights of the experts used sum to one.
    """

    router: torch.Tensor
    experts: list[GatedMLP]
    used: int
    renormalised: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = F.linear(x, self.router).softmax(-1).topk(self.used, dim=-1)  # [T, U] each
        if self.renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            out.index_add_(0, token, self.experts[expert](x[token]) * weights[token, place, None])
        return out
