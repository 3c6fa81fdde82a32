"""From a checkpoint to a decoder that is ready to compute."""

from __future__ import annotations

import torch

from backend_lib.checkpoint import Checkpoint, HashConfig
from backend_lib.checkpoint.fields import source_named
from backend_lib.config import Settings
from backend_lib.models.batch import Decoder
from backend_lib.models.build import DecoderBuilder
from backend_lib.models.decoder import TransformerDecoder
from backend_lib.models.hash_model import HashModel
from backend_lib.models.linear import QUANTISED, has_vector_kernels
from backend_lib.models.weights import open_tensors


def load_decoder(checkpoint: Checkpoint, settings: Settings) -> Decoder:
    """Raises ValueError naming a tensor or file that is missing, damaged or of the wrong shape."""
    config = checkpoint.config
    if isinstance(config, HashConfig):
        return HashModel(config)
    max_position = settings.max_model_len or config.max_position
    with source_named(str(checkpoint.path)):
        weights = weight_format(settings)
        decoder = DecoderBuilder(config, open_tensors(checkpoint), weights, max_position).decoder()
    return _compiled(decoder, settings) if weights in QUANTISED else decoder


def weight_format(settings: Settings) -> str:
    """The setting `weights`; `fp16` for `auto` where the CPU lacks instructions for less.

    Raises ValueError when the setting asks for what the CPU lacks.
    """
    if settings.weights not in QUANTISED or has_vector_kernels():
        return settings.weights
    if settings.weights == "auto":
        return "fp16"
    raise ValueError(f"parameter 'weights' is '{settings.weights}', which needs an x86-64 CPU with AVX2, FMA and F16C")


def _compiled(decoder: TransformerDecoder, settings: Settings) -> Decoder:
    """The decoder as one program, if it can be said so."""
    from backend_lib.models.compiled import CompiledDecoder, can_compile, half_type

    if not can_compile(decoder):
        return decoder
    capacity = settings.prefill_chunk + settings.max_running
    return CompiledDecoder(decoder, capacity, torch.float32 if settings.dtype == "float32" else half_type(decoder))
