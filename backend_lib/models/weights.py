"""Tensors by name, copied a block of rows at a time, so that no second copy of a model or a tensor is ever held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from backend_lib.checkpoint import Checkpoint, DecoderConfig
from backend_lib.models.gguf_tensors import GgufTensors
from backend_lib.models.safetensors_files import SafetensorsFiles
from backend_lib.models.shapes import Part


class TensorSource(Protocol):
    """Where a checkpoint's tensors come from. Names are GGUF's, which are the same for all families."""

    def check(self, name: str, shape: Sequence[int], expert: int | None = None) -> None:
        """Raises ValueError when the file has not got that tensor, or it is not of that shape.

        Called before anything of the tensor's size is made: what a configuration asks for may be any number.
        """

    def read_into(self, out: Tensor, name: str, expert: int | None = None, part: Part | None = None) -> None:
        """Copy the tensor `name`, or one expert's, into `out`, of whatever floating type that is.

        `part`: what of it, in the shape of `out`; all if not given. No more than that is read of the file, but for
        quantised blocks that it begins or ends in. Of queries and keys, heads must be wanted whole.
        Raises ValueError as `check` does.
        """

    def check_all_read(self) -> None:
        """Raises ValueError naming a tensor that was not asked for: the checkpoint is of another architecture."""


def open_tensors(checkpoint: Checkpoint, readers: int = 1) -> TensorSource:
    """`readers`: how many read a share of the checkpoint each, for what is said of the progress."""
    assert isinstance(checkpoint.config, DecoderConfig)
    if checkpoint.weights.gguf is not None:
        return GgufTensors(checkpoint.weights.gguf, checkpoint.config, readers)
    return SafetensorsFiles(checkpoint.weights.safetensors, checkpoint.config, readers)
