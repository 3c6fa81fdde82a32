"""How long sequences may be, and how large the arena is that holds them."""

from __future__ import annotations

from backend_lib.arena import ArenaSpec
from backend_lib.arena.layout import logprob_row
from backend_lib.checkpoint import Checkpoint
from backend_lib.config import Settings
from backend_lib.router.fields import MAX_LOGPROBS
from backend_lib.router.group import ring_records

_MAX_HEAP_BYTES = 1 << 31
_PARAMS_BYTES = 4096  # of a typical slot's parameter blob
_MAX_PARAMS_BYTES = 4 << 20  # of the largest: every id of a vocabulary, many biases, banned words and a grammar


def max_model_len(settings: Settings, checkpoint: Checkpoint) -> int:
    """Tokens a sequence may have. Raises ValueError when more is asked for than the checkpoint was made for."""
    if settings.max_model_len is None:
        return checkpoint.context_length
    if settings.max_model_len > checkpoint.context_length:
        raise ValueError(
            f"parameter 'max_model_len' is {settings.max_model_len}; "
            f"allowed is at most {checkpoint.context_length}, the context of {settings.model}"
        )
    return settings.max_model_len


def arena_spec(settings: Settings, max_model_len: int) -> ArenaSpec:
    num_slots = settings.queue_size + settings.data_parallel * settings.max_running
    return ArenaSpec(
        num_groups=settings.data_parallel,
        num_ranks=settings.tensor_parallel,
        num_slots=num_slots,
        ring_records=ring_records(settings.max_running),
        dirty_records=max(4 * num_slots, 1024),
        heap_bytes=min(_heap_bytes(num_slots, max_model_len), _MAX_HEAP_BYTES),
    )


def _heap_bytes(num_slots: int, max_model_len: int) -> int:
    """Room for what sequences have most often, and for one that asks for everything."""
    largest = max_model_len * (4 + logprob_row(1 + MAX_LOGPROBS).itemsize) + _MAX_PARAMS_BYTES
    return max(num_slots * (4 * max_model_len + _PARAMS_BYTES), largest)
