"""A model's folder without weights: its configuration, and a tokenizer of made-up words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, islice, product
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_LETTERS = "etaoinshrdlucmfwypvbgk"


def write_folder(path: Path, config: dict[str, Any]) -> Path:
    """The file of weights is empty: random ones take its place, see `benchmarks.device.model`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(islice(_words(), config["vocab_size"]))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "model.safetensors").touch()
    return path


def _words() -> Iterator[str]:
    yield from ("<s>", "</s>")
    yield from sorted(pre_tokenizers.ByteLevel.alphabet())
    for length in count(2):
        yield from ("Ġ" + "".join(letters) for letters in product(_LETTERS, repeat=length))
