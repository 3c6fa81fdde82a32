"""From a checkpoint to a decoder that is ready to compute."""

from __future__ import annotations

from backend_lib.checkpoint import Checkpoint, HashConfig
from backend_lib.config import Settings
from backend_lib.models.batch import Decoder
from backend_lib.models.hash_model import HashModel


def load_decoder(checkpoint: Checkpoint, settings: Settings) -> Decoder:
    """Raises ValueError naming a tensor that is missing, damaged or of the wrong shape."""
    if isinstance(checkpoint.config, HashConfig):
        return HashModel(checkpoint.config)
    raise NotImplementedError
