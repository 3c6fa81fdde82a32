"""What a checkpoint says without torch: decoder configuration, tokenizer, chat template, end-of-sequence ids, files."""

from backend_lib.checkpoint.checkpoint import Checkpoint, Weights
from backend_lib.checkpoint.decoder_config import (
    DecoderConfig,
    ExpertsConfig,
    HashConfig,
    LayerConfig,
    RopeConfig,
    RopeScaling,
)
from backend_lib.checkpoint.locate import open_checkpoint
from backend_lib.checkpoint.ranks import check_ranks, inner_unit
from backend_lib.checkpoint.sampling_defaults import SamplingDefaults

__all__ = [
    "Checkpoint",
    "DecoderConfig",
    "ExpertsConfig",
    "HashConfig",
    "LayerConfig",
    "RopeConfig",
    "RopeScaling",
    "SamplingDefaults",
    "Weights",
    "check_ranks",
    "inner_unit",
    "open_checkpoint",
]
