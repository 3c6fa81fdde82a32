"""From a checkpoint to a decoder that is ready to compute."""

from __future__ import annotations

from backend_lib.checkpoint import Checkpoint, HashConfig
from backend_lib.checkpoint.fields import source_named
from backend_lib.config import Settings
from backend_lib.models.batch import Decoder
from backend_lib.models.build import DecoderBuilder
from backend_lib.models.hash_model import HashModel
from backend_lib.models.weights import open_tensors


def load_decoder(checkpoint: Checkpoint, settings: Settings) -> Decoder:
    """Raises ValueError naming a tensor or file that is missing, damaged or of the wrong shape."""
    config = checkpoint.config
    if isinstance(config, HashConfig):
        return HashModel(config)
    max_position = settings.max_model_len or config.max_position
    with source_named(str(checkpoint.path)):
        return DecoderBuilder(config, open_tensors(checkpoint), settings.weights, max_position).decoder()
