"""Tensors by name, from safetensors or GGUF, one at a time so that no second copy of the model is ever held.

Names are those of Hugging Face's Llama; the GGUF source translates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from backend_lib.checkpoint import Checkpoint, DecoderConfig

_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class TensorSource(Protocol):
    """Where a checkpoint's tensors come from."""

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """The tensor `name` as float32. Raises ValueError naming one that is missing or not of `shape`."""


def open_tensors(checkpoint: Checkpoint) -> TensorSource:
    assert isinstance(checkpoint.config, DecoderConfig)
    if checkpoint.weights.gguf is not None:
        return GgufTensors(checkpoint.weights.gguf, checkpoint.config)
    return SafetensorsTensors(checkpoint.weights.safetensors)


class SafetensorsTensors:
    """Shards mapped into memory; a page is read when its tensor is."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.places = {}
        for path in paths:
            with _damage_named(path):
                shard = safe_open(path, framework="pt")
                self.places.update(dict.fromkeys(shard.keys(), (path, shard)))

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if name not in self.places:
            raise ValueError(f"the checkpoint has no tensor '{name}'")
        path, shard = self.places[name]
        with _damage_named(path):
            tensor = shard.get_tensor(name)
        if tensor.dtype not in _FLOAT_TYPES:
            raise ValueError(f"{path}: tensor '{name}' is {tensor.dtype}; supported are float32, float16 and bfloat16")
        _check_shape(name, tensor.shape, shape)
        return tensor.float()


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


class GgufTensors:
    """Tensors of a GGUF file, dequantised."""

    def __init__(self, reader: gguf.GGUFReader, config: DecoderConfig) -> None:
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        gguf_name = _gguf_name(name)
        if gguf_name not in self.tensors:
            raise ValueError(f"the checkpoint has no tensor '{gguf_name}'")
        tensor = self.tensors[gguf_name]
        _check_shape(gguf_name, tensor.shape[::-1].tolist(), shape)
        values = torch.from_numpy(_dequantise(tensor))
        heads = self.heads.get(gguf_name.split(".")[-2])
        return _unpermute(values, heads) if heads else values


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if layer := _LAYER_NAME.fullmatch(stem):
        return f"blk.{layer[1]}.{_GGUF_NAMES[layer[2]]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _dequantise(tensor: gguf.ReaderTensor) -> np.ndarray:
    """float32, in memory of its own: float32 tensors come as the file's read-only mapping, which torch cannot take."""
    try:
        return np.require(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32, ["C", "W"])
    except NotImplementedError:
        raise ValueError(
            f"tensor '{tensor.name}' has the type {tensor.tensor_type.name}, which cannot be read"
        ) from None


def _unpermute(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's conversion: it interleaves the two halves of each head, for a rotation of neighbours."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _check_shape(name: str, shape: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(shape) != tuple(wanted):
        raise ValueError(f"tensor '{name}' has the shape {list(shape)}; the configuration asks for {list(wanted)}")
