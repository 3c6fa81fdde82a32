"""Checkpoints in the form Hugging Face keeps them: a folder with config.json, tokenizer.json and safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from backend_lib.checkpoint.checkpoint import Checkpoint, Weights
from backend_lib.checkpoint.decoder_config import DecoderConfig, HashConfig
from backend_lib.checkpoint.fields import Fields
from backend_lib.checkpoint.hf_chat_templates import read_chat_templates
from backend_lib.checkpoint.hf_config import read_config
from backend_lib.checkpoint.sampling_defaults import SamplingDefaults
from backend_lib.checkpoint.untrusted import check_size, is_there, parser_errors

_INDEX = "model.safetensors.index.json"
_MAX_TOKENIZER_BYTES = 1 << 28


def read_folder(folder: Path) -> Checkpoint:
    """Raises ValueError naming the file that is missing, damaged, or asks for something unsupported."""
    fields = Fields.from_json(_required(folder, "config.json"))
    config = read_config(fields)
    generation = Fields.from_json_if_there(folder / "generation_config.json")
    texts = Fields.from_json_if_there(folder / "tokenizer_config.json")
    templates = read_chat_templates(folder, texts)
    return Checkpoint(
        name=folder.resolve().name,
        path=folder,
        config=config,
        tokenizer=_tokenizer(_required(folder, "tokenizer.json")),
        eos_token_ids=_eos_token_ids(fields, generation, config.vocab_size),
        chat_template=templates.default,
        tool_template=templates.tool_use,
        bos_token=_token_text(texts, "bos_token"),
        eos_token=_token_text(texts, "eos_token"),
        sampling=SamplingDefaults.from_generation_config(generation),
        weights=_weights(folder, config),
    )


def _required(folder: Path, name: str) -> Path:
    path = folder / name
    if not is_there(path):
        raise ValueError(f"{folder} has no {name}")
    return path


def _tokenizer(path: Path) -> Tokenizer:
    check_size(path, _MAX_TOKENIZER_BYTES)
    with parser_errors(f"{path} is not a tokenizer that can be read"):
        tokenizer = Tokenizer.from_file(str(path))
    if not tokenizer.get_vocab_size():
        raise ValueError(f"{path} has no tokens")
    # Both may be left in the file by training; a prompt must be neither cut nor filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _eos_token_ids(config: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    fields = config if generation.values.get("eos_token_id") is None else generation
    ids = fields.token_ids("eos_token_id")
    if any(i >= vocab_size for i in ids):
        raise fields.error("eos_token_id", f"token ids below the vocabulary's {vocab_size}")
    return ids


def _token_text(texts: Fields, key: str) -> str:
    """A special token is written as a string, or as an object with its `content`."""
    if isinstance(texts.values.get(key), dict):
        return texts.nested(key).text("content")
    return texts.text(key, "")


def _weights(folder: Path, config: DecoderConfig | HashConfig) -> Weights:
    if isinstance(config, HashConfig):
        return Weights()
    if is_there(folder / _INDEX):
        return Weights(safetensors=_shards(folder))
    files = tuple(sorted(path for path in folder.glob("*.safetensors") if is_there(path)))
    if len(files) == 1:
        return Weights(safetensors=files)
    if files:
        raise ValueError(f"{folder} has several safetensors files but no {_INDEX}")
    for suffix in (".bin", ".pt", ".pth"):
        if any(folder.glob(f"*{suffix}")):
            raise ValueError(
                f"{folder} has its weights only as {suffix} pickles, which are not read; convert them to safetensors"
            )
    raise ValueError(f"{folder} has no safetensors weights")


def _shards(folder: Path) -> tuple[Path, ...]:
    index = Fields.from_json(folder / _INDEX)
    names = list(index.nested("weight_map").values.values())
    if not names or not all(_is_shard(name) for name in names):
        raise index.error(
            "weight_map", "an object of tensor name to the name of a .safetensors file in the same folder"
        )
    return tuple(_required(folder, name) for name in sorted(set(names)))


def _is_shard(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")
