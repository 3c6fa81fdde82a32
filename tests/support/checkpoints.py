"""Small checkpoints made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

FIRST_CHARACTER = 0x4E00  # id i is written as the character of this code point plus i
_LAST_CHARACTER = 0xD7FF  # what follows are surrogates, which no text can hold

BOS, EOS = "<s>", "</s>"
TINY_VOCAB = 512
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Roles are dropped, as characters without ids; with `think` the model is told to reason.
HASH_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% if think %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}"
)
_TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{{ eos_token }}{% endfor %}"


def make_hash_checkpoint(
    path: Path, *, vocab_size: int = 1024, eos_token_id: int = 2, max_position: int = 4096
) -> Path:
    """A folder for the test-only model. Text and ids map one to one: see `hash_text`; other characters have no ids."""
    assert vocab_size <= _LAST_CHARACTER - FIRST_CHARACTER + 1
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "tandem_hash",
        "architectures": ["TandemHashModel"],
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        "max_position_embeddings": max_position,
    }
    (path / "config.json").write_text(json.dumps(config))
    vocabulary = {chr(FIRST_CHARACTER + i): i for i in range(vocab_size) if i != eos_token_id}
    tokenizer = Tokenizer(BPE(vocabulary | {"<eos>": eos_token_id}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(HASH_TEMPLATE)
    return path


def hash_text(ids: list[int]) -> str:
    """The text that the test-only model's tokenizer turns into `ids`, and back."""
    return "".join(chr(FIRST_CHARACTER + i) for i in ids)


def tiny_tokens() -> tuple[list[str], list[tuple[str, str]]]:
    """A byte-level vocabulary of TINY_VOCAB tokens (BOS, EOS, bytes, pairs of letters) and its merges."""
    letters = "etaoinshrdlucmfwypvbgk"
    pairs = [(left, right) for left in letters for right in letters][: TINY_VOCAB - 258]
    return [BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)], pairs


def tiny_tokenizer(*, add_bos: bool = False) -> Tokenizer:
    tokens, merges = tiny_tokens()
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, normalized=False), AddedToken(EOS, normalized=False)])
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single=[BOS, "$A"], special_tokens=[(BOS, 0)])
    return tokenizer


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """The fields of a small Llama's config.json."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    } | overrides


def make_config_folder(path: Path, *, add_bos: bool = False, **overrides: Any) -> Path:
    """A Llama's folder with everything but the weights, made without torch."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(tiny_config(**overrides)))
    texts = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": _TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(texts))
    tiny_tokenizer(add_bos=add_bos).save(str(path / "tokenizer.json"))
    return path


def make_tiny_llama(
    path: Path, *, seed: int = 0, shard_size: str = "1GB", dtype: str = "float32", **overrides: Any
) -> Path:
    """A random Llama of 2 layers, written by transformers. `overrides` are fields of its configuration."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    make_config_folder(path)
    torch.manual_seed(seed)
    # A wide initialisation, so that logits differ by more than rounding and biases are not all zero.
    model = LlamaForCausalLM(LlamaConfig(**tiny_config(initializer_range=0.15, **overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(1.0, 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shard_size)
    return path


def make_tiny_gguf(
    path: Path,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    arch: str = "llama",
    metadata: Mapping[str, Any] = MappingProxyType({}),
    **overrides: Any,
) -> Path:
    """The small Llama as GGUF, or another model by its metadata.

    `tensors` are float32 by GGUF name; matrices are written as `quantization`. An override of None leaves a key out;
    `__` in its name stands for a dot.
    """
    writer = gguf.GGUFWriter(path, arch)
    overrides = {key.replace("__", "."): value for key, value in overrides.items()}
    for key, value in (_tiny_metadata() | metadata | overrides).items():
        if value is not None:
            writer.add_key_value(
                key, value, _gguf_type(value), _gguf_type(value[0]) if isinstance(value, list) else None
            )
    for name, values in (tensors or {}).items():
        kind = quantization if values.ndim >= 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tiny_metadata() -> dict[str, Any]:
    return _tiny_tokenizer_metadata() | {
        "llama.vocab_size": TINY_VOCAB,
        "llama.context_length": 512,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.block_count": 2,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
    }


def _tiny_tokenizer_metadata() -> dict[str, Any]:
    tokens, merges = tiny_tokens()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (TINY_VOCAB - 2),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def _gguf_type(value: Any) -> gguf.GGUFValueType:
    if isinstance(value, int) and not isinstance(value, bool):
        return gguf.GGUFValueType.UINT32 if value >= 0 else gguf.GGUFValueType.INT32
    return gguf.GGUFValueType.get_type(value)
