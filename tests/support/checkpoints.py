"""Small checkpoints made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

FIRST_CHARACTER = 0x4E00  # id i is written as the character of this code point plus i
_LAST_CHARACTER = 0xD7FF  # what follows are surrogates, which no text can hold


def make_hash_checkpoint(
    path: Path, *, vocab_size: int = 1024, eos_token_id: int = 2, max_position: int = 4096
) -> Path:
    """A folder for the test-only model. Text and ids map one to one: see `hash_text`."""
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
    return path


def hash_text(ids: list[int]) -> str:
    """The text that the test-only model's tokenizer turns into `ids`, and back."""
    return "".join(chr(FIRST_CHARACTER + i) for i in ids)
