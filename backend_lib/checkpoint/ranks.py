"""Among how many ranks a decoder can be divided, which the router says before it starts a worker."""

from __future__ import annotations

from backend_lib.checkpoint.decoder_config import DecoderConfig

_CODES = 32  # inputs that share a scale in quantised weights


def check_ranks(config: DecoderConfig, size: int) -> None:
    """Raises ValueError naming `tensor_parallel` where there is nothing left for a rank to compute."""
    limits = [(config.num_heads, f"{config.num_heads} query heads")]
    if not all(layer.has_experts for layer in config.layers):
        limits.append(_inner_limit(config.intermediate_size, "an MLP"))
    if config.experts:
        limits.append(_inner_limit(config.experts.intermediate_size, "an expert"))
    most, what = min(limits)
    if size > 1 and most < size:
        raise ValueError(
            f"parameter 'tensor_parallel' is {size}; allowed for this checkpoint is at most {most}: it has {what}"
        )


def inner_unit(inner: int) -> int:
    """In what units an inner size is cut. Codes of weights are made in groups: what is cut between them has the codes
    of the whole."""
    return 1 if inner % _CODES else _CODES


def _inner_limit(inner: int, what: str) -> tuple[int, str]:
    unit = inner_unit(inner)
    return inner // unit, f"{what} of inner size {inner}, which is divided in units of {unit}"
