"""From a checkpoint to a decoder that is ready to compute."""

from __future__ import annotations

import torch

from backend_lib.checkpoint import Checkpoint, HashConfig
from backend_lib.checkpoint.fields import source_named
from backend_lib.config import PROMPT_LOGPROBS_PER_STEP, Settings
from backend_lib.models.batch import Decoder
from backend_lib.models.build import DecoderBuilder
from backend_lib.models.decoder import TransformerDecoder
from backend_lib.models.division import check_groups, divide
from backend_lib.models.graphed import GraphedDecoder
from backend_lib.models.hash_model import HashModel
from backend_lib.models.linear import QUANTISED
from backend_lib.models.parallel import ALONE, Ranks
from backend_lib.models.placement import Placement, place, step_maker
from backend_lib.models.weights import open_tensors


def load_decoder(
    checkpoint: Checkpoint, settings: Settings, placement: Placement | None = None, ranks: Ranks = ALONE
) -> Decoder:
    """`placement`: as `place(settings, checkpoint)` says, which is asked if it is not given.
    `ranks`: those among which the decoder is divided; what is returned is the share of one of them.

    Raises ValueError naming a tensor or file that is missing, damaged or of the wrong shape, or a setting that this
    machine or checkpoint cannot follow.
    """
    placement = placement or place(settings, checkpoint)
    if isinstance(checkpoint.config, HashConfig):
        return HashModel(checkpoint.config, ranks)
    return _fast(build_decoder(checkpoint, settings, placement, ranks), placement, settings)


def build_decoder(
    checkpoint: Checkpoint, settings: Settings, placement: Placement | None = None, ranks: Ranks = ALONE
) -> TransformerDecoder:
    """The decoder as its layers describe it, without what makes it fast. Arguments and errors are `load_decoder`'s."""
    config = checkpoint.config
    assert not isinstance(config, HashConfig)
    placement = placement or place(settings, checkpoint)
    max_position = settings.max_model_len or config.max_position
    with source_named(str(checkpoint.path)):
        share = divide(config, ranks.size)[ranks.rank]
        if placement.weights in ("int8", "int4"):
            check_groups(config, ranks.size, placement.weights)
        start_step = step_maker(placement, share.config, settings)
        tensors = open_tensors(checkpoint, ranks.size)
        return DecoderBuilder(share, tensors, placement, start_step, max_position, ranks).decoder()


def _fast(decoder: TransformerDecoder, placement: Placement, settings: Settings) -> Decoder:
    """What runs it without a call from Python for each operation, where there is such a thing."""
    if placement.by_kernels:
        return GraphedDecoder(
            decoder, max_decodes=settings.max_running, max_prompt=settings.prefill_chunk,
            max_logits=settings.max_running + PROMPT_LOGPROBS_PER_STEP,
        )  # fmt: skip
    return _compiled(decoder, settings) if placement.weights in QUANTISED else decoder


def _compiled(decoder: TransformerDecoder, settings: Settings) -> Decoder:
    """The decoder as one program, if it can be said so."""
    from backend_lib.models.compiled import CompiledDecoder, can_compile, half_type

    if not can_compile(decoder):
        return decoder
    capacity = settings.prefill_chunk + settings.max_running
    return CompiledDecoder(decoder, capacity, torch.float32 if settings.dtype == "float32" else half_type(decoder))
