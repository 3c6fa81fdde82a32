"""Decoders and the loading of their weights."""

from backend_lib.models.batch import Decoder, ForwardBatch
from backend_lib.models.load import load_decoder

__all__ = ["Decoder", "ForwardBatch", "load_decoder"]
