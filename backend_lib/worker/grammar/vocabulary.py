"""The bytes that each token of a checkpoint stands for: what a grammar is matched against."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from tokenizers import Tokenizer

from backend_lib.checkpoint import Checkpoint

_BYTE_PIECES = {f"<0x{byte:02X}>": byte for byte in range(256)}


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[i]` is the text of id i; empty for special tokens and ids that no token has, which no grammar allows.

    `stop_token_ids` are the ends of a sequence, which are allowed exactly where a grammar may end.
    """

    tokens: tuple[bytes, ...]
    stop_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Vocabulary:
        """As long as the logits are: a checkpoint may have more of them than its tokenizer has tokens, or fewer."""
        size = checkpoint.config.vocab_size
        tokens = [b""] * size
        for token_id, text in _token_bytes(checkpoint.tokenizer).items():
            if token_id < size:
                tokens[token_id] = text
        stops = tuple(sorted(each for each in checkpoint.eos_token_ids if each < size))
        for token_id in stops:
            tokens[token_id] = b""
        return cls(tuple(tokens), stops)

    def to_json(self) -> bytes:
        # Each byte as the character of its number, for JSON knows only text.
        return json.dumps([[token.decode("latin-1") for token in self.tokens], self.stop_token_ids]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Vocabulary:
        tokens, stops = json.loads(text)
        return cls(tuple(token.encode("latin-1") for token in tokens), tuple(stops))


def _token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """By id. Tokens added to the model's own are written as they are; special ones stand for no text."""
    parts = json.loads(tokenizer.to_str())
    spelling = _spelling(parts["decoder"])
    tokens = {token_id: spelling(token) for token, token_id in tokenizer.get_vocab().items()}
    for added in parts["added_tokens"]:
        tokens[added["id"]] = b"" if added["special"] else added["content"].encode()
    return tokens


def _spelling(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """How the tokenizer's decoder turns one token into bytes.

    Byte-level: each character is a byte. SentencePiece: a mark for the space, and pieces such as <0x0A> for bytes that
    no piece covers. What joins tokens or strips the first blank of a whole text does not concern a token alone.
    """
    steps = _flat(decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    marks = [mark for step in steps if (mark := _space_mark(step))]
    pieces = _BYTE_PIECES if "ByteFallback" in kinds else {}

    def spell(token: str) -> bytes:
        if token in pieces:
            return bytes([pieces[token]])
        return reduce(lambda text, mark: text.replace(*mark), marks, token).encode()

    return spell


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [each for child in decoder["decoders"] for each in _flat(child)]


def _space_mark(step: dict[str, Any]) -> tuple[str, str] | None:
    """What the step replaces in a token, and by what."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


def _byte_table() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, all others for 256 and up, in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_table()


def _byte_level(token: str) -> bytes:
    """A token with other characters was not made from bytes, and is its own text."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()
