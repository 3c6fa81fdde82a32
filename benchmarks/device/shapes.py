"""Checkpoints of random weights in the shape of a Llama, written as a folder that Tandem and transformers read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_SHARD_LAYERS = 4
_SPREAD = 0.02  # standard deviation of weights


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    context: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def layer_weights(self) -> int:
        """Elements of a layer's products."""
        return self.hidden * (self.qkv + self.heads * self.head_dim + 3 * self.inner)

    @property
    def step_weights(self) -> int:
        """Elements that a decode step reads: all products, the head's among them; of the embedding it reads rows."""
        return self.layers * self.layer_weights + self.hidden * self.vocab

    @property
    def kv_values(self) -> int:
        """Elements of keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def prompt_flops(self, start: int, length: int) -> float:
        """Of tokens `start` to `start + length`, attention to all before each of them included, one row of logits."""
        products = 2 * length * self.layers * self.layer_weights + 2 * self.hidden * self.vocab
        seen = length * start + length * (length + 1) / 2
        return products + 4 * self.layers * self.heads * self.head_dim * seen


LLAMA_8B = Shape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, inner=14336, vocab=128256, context=131072
)  # fmt: skip
SMALL = Shape(layers=4, hidden=1024, heads=16, kv_heads=4, head_dim=64, inner=2816, vocab=32000, context=4096)
TINY = Shape(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, inner=96, vocab=320, context=512)


def write_checkpoint(folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device, *, seed: int = 0) -> Path:
    """Config, a tokenizer of bytes and filling words, and shards. Weights are drawn on the device."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(shape, dtype)))
    _tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))
    torch.manual_seed(seed)
    for number, names in enumerate(_shards(shape)):
        tensors = {name: _random(name, size, dtype, device) for name, size in names.items()}
        save_file(tensors, folder / f"model-{number:05}.safetensors", metadata={"format": "pt"})
    _write_index(folder, shape)
    return folder


def _config(shape: Shape, dtype: torch.dtype) -> dict:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "bos_token_id": 0,
        "eos_token_id": 1, "tie_word_embeddings": False, "torch_dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def _tokenizer(vocab_size: int) -> Tokenizer:
    """A character of a prompt is a token; what a model says is mostly filling words."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    filling = [f"word{number}" for number in range(vocab_size - 2 - len(characters))]
    tokens = ["<s>", "</s>", *characters, *filling]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def _shards(shape: Shape) -> Iterator[dict[str, tuple[int, ...]]]:
    yield {
        "model.embed_tokens.weight": (shape.vocab, shape.hidden),
        "lm_head.weight": (shape.vocab, shape.hidden),
        "model.norm.weight": (shape.hidden,),
    }
    for first in range(0, shape.layers, _SHARD_LAYERS):
        names: dict[str, tuple[int, ...]] = {}
        for layer in range(first, min(first + _SHARD_LAYERS, shape.layers)):
            names |= {f"model.layers.{layer}.{name}.weight": size for name, size in _layer(shape).items()}
        yield names


def _layer(shape: Shape) -> dict[str, tuple[int, ...]]:
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "input_layernorm": (shape.hidden,),
        "self_attn.q_proj": (query, shape.hidden),
        "self_attn.k_proj": (key, shape.hidden),
        "self_attn.v_proj": (key, shape.hidden),
        "self_attn.o_proj": (shape.hidden, query),
        "post_attention_layernorm": (shape.hidden,),
        "mlp.gate_proj": (shape.inner, shape.hidden),
        "mlp.up_proj": (shape.inner, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.inner),
    }


def _random(name: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(size, dtype=dtype)
    return torch.empty(size, dtype=dtype, device=device).normal_(0, _SPREAD).cpu()


def _write_index(folder: Path, shape: Shape) -> None:
    places = {
        name: f"model-{number:05}.safetensors" for number, names in enumerate(_shards(shape)) for name in names
    }
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
