"""Tensors of a GGUF file, dequantised."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import gguf
import numpy as np
import torch

from backend_lib.checkpoint import DecoderConfig
from backend_lib.models.progress import Progress
from backend_lib.models.shapes import Part, check_shape

# Read for the configuration, not for the decoder.
_NOT_NEEDED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# llama.cpp rotates neighbours where these come from Hugging Face's halves, and its conversion reorders the rows.
_PERMUTED = ("LlamaForCausalLM", "SmolLM3ForCausalLM")
# What has been read of the mapped file stays in memory until it is given back.
_GIVE_BACK_BYTES = 32 << 20


class GgufTensors:
    """`readers`: how many read a share of the file each, this one included."""

    def __init__(self, reader: gguf.GGUFReader, config: DecoderConfig, readers: int = 1) -> None:
        self.architecture = config.architecture
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.unread = set(self.tensors).difference(_NOT_NEEDED)
        self.num_experts = config.experts.count if config.experts else 0
        self.heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
        if config.architecture not in _PERMUTED:
            self.heads = {}
        self.progress = Progress(sum(int(tensor.n_bytes) for tensor in reader.tensors) // readers)
        self._mapping = _mapping_of(reader.data)
        self._held_bytes = 0

    def check(self, name: str, shape: Sequence[int], expert: int | None = None) -> None:
        if name not in self.tensors:
            raise ValueError(f"the checkpoint has no tensor '{name}'")
        whole_shape = shape if expert is None else (self.num_experts, *shape)
        check_shape(name, self.tensors[name].shape[::-1].tolist(), whole_shape)

    def read_into(self, out: torch.Tensor, name: str, expert: int | None = None, part: Part | None = None) -> None:
        part = part or Part.whole(out.shape)
        self.check(name, part.shape, expert)
        tensor = self.tensors[name]
        data = tensor.data if expert is None else tensor.data[expert]
        for block, rows in part.row_blocks():
            out[block].copy_(self._read_block(tensor, data[rows], part.columns))
        heads = self.heads.get(name.split(".")[-2])
        if heads:
            out.copy_(_unpermute(out, heads * len(out) // part.shape[0]))
        self.unread.discard(name)

    def _read_block(self, tensor: gguf.ReaderTensor, data: np.ndarray, columns: range | None) -> torch.Tensor:
        if columns is None:
            self._account(data.nbytes)
            return torch.from_numpy(_dequantise(tensor, data))
        data, start = _blocks_with(tensor, data, columns)
        self._account(data.nbytes)
        return torch.from_numpy(_dequantise(tensor, data))[:, start : start + len(columns)]

    def check_all_read(self) -> None:
        if self.unread:
            raise ValueError(
                f"the checkpoint has a tensor '{min(self.unread)}' ({len(self.unread)} such), "
                f"which {self.architecture} with this configuration does not"
            )

    def _account(self, num_bytes: int) -> None:
        self.progress.add(num_bytes)
        self._held_bytes += num_bytes
        if self._mapping is not None and self._held_bytes > _GIVE_BACK_BYTES:
            self._mapping.madvise(mmap.MADV_DONTNEED)
            self._held_bytes = 0


def _mapping_of(data: np.ndarray | None) -> mmap.mmap | None:
    """The mapping at the bottom of a reader's array."""
    base: object = data
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _blocks_with(tensor: gguf.ReaderTensor, data: np.ndarray, columns: range) -> tuple[np.ndarray, int]:
    """A copy of the blocks, in every row, that hold these columns, and where they start in there.

    A type's values come in blocks along a row, which can only be dequantised whole; a block of 1 is a plain number.
    """
    values, num_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    first, last = columns.start // values, -(-columns.stop // values)
    width = num_bytes // data.itemsize
    return np.ascontiguousarray(data[:, first * width : last * width]), columns.start - first * values


def _dequantise(tensor: gguf.ReaderTensor, data: np.ndarray) -> np.ndarray:
    """float32 that torch can take: float32 tensors come as the file's read-only mapping, which it cannot."""
    try:
        values = gguf.dequantize(data, tensor.tensor_type)
    except NotImplementedError:
        raise ValueError(
            f"tensor '{tensor.name}' has the type {tensor.tensor_type.name}, which cannot be read"
        ) from None
    return (
        np.array(values, np.float32) if np.shares_memory(values, data) else np.require(values, np.float32, ["C", "W"])
    )


def _unpermute(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's conversion: it interleaves the two halves of each head, for a rotation of neighbours."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
