"""Tensors by name, one at a time so that no second copy of the model is ever held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from backend_lib.checkpoint import Checkpoint, DecoderConfig
from backend_lib.models.gguf_tensors import GgufTensors
from backend_lib.models.safetensors_files import SafetensorsFiles


class TensorSource(Protocol):
    """Where a checkpoint's tensors come from. Names are GGUF's, which are the same for all families."""

    def read(self, name: str, shape: Sequence[int], expert: int | None = None) -> Tensor:
        """The tensor `name`, or one expert's part of it, as float32 in memory of its own.

        Raises ValueError naming one that is missing or not of `shape`.
        """

    def check_all_read(self) -> None:
        """Raises ValueError naming a tensor that was not asked for: the checkpoint is of another architecture."""


def open_tensors(checkpoint: Checkpoint) -> TensorSource:
    assert isinstance(checkpoint.config, DecoderConfig)
    if checkpoint.weights.gguf is not None:
        return GgufTensors(checkpoint.weights.gguf, checkpoint.config)
    return SafetensorsFiles(checkpoint.weights.safetensors, checkpoint.config)
