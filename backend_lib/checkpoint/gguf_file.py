"""Checkpoints in one GGUF file: metadata, tokenizer and tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import Tokenizer

from backend_lib.checkpoint.checkpoint import Checkpoint, Weights
from backend_lib.checkpoint.fields import Fields, source_named
from backend_lib.checkpoint.gguf_config import read_gguf_config
from backend_lib.checkpoint.gguf_reader import open_gguf
from backend_lib.checkpoint.gguf_tokenizer import build_tokenizer
from backend_lib.checkpoint.sampling_defaults import SamplingDefaults

_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_gguf(path: Path) -> Checkpoint:
    """Raises ValueError naming the file and what in it is damaged or not supported."""
    with source_named(str(path)):
        reader = open_gguf(path)
        fields = Fields({name: _value(field) for name, field in reader.fields.items()}, str(path))
        return _checkpoint(path, fields, reader)


def _checkpoint(path: Path, fields: Fields, reader: GGUFReader) -> Checkpoint:
    config = read_gguf_config(fields, {tensor.name: tensor for tensor in reader.tensors})
    tokenizer = build_tokenizer(fields)
    return Checkpoint(
        name=path.stem,
        path=path,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(fields, config.vocab_size),
        chat_template=fields.text("tokenizer.chat_template", "") or None,
        tool_template=fields.text("tokenizer.chat_template.tool_use", "") or None,
        bos_token=_token_text(fields, "tokenizer.ggml.bos_token_id", tokenizer),
        eos_token=_token_text(fields, "tokenizer.ggml.eos_token_id", tokenizer),
        sampling=SamplingDefaults.from_gguf(fields),
        weights=Weights(gguf=reader),
    )


def _value(field: Any) -> Any:
    try:
        return field.contents() if field.types else None
    except UnicodeDecodeError as error:
        raise ValueError(f"'{field.name}' is not UTF-8: {error}") from None


def _eos_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(i for key in _END_KEYS for i in fields.token_ids(key)))
    return tuple(i for i in ids if i < vocab_size)  # converters write -1 as 2**32 - 1 for "none"


def _token_text(fields: Fields, key: str, tokenizer: Tokenizer) -> str:
    ids = fields.token_ids(key)
    return (tokenizer.id_to_token(ids[0]) or "") if ids else ""
