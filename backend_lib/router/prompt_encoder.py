"""Prompts to token ids, without work for what cannot fit and without stopping other threads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from backend_lib.router.refusals import RequestError

# Bytes of text for each that ends up in a token, where a tokenizer does not keep them all. NFC leaves a third at least.
# What drops blanks, accents or unknown characters has no bound, so there the limit is ours.
_SHRINKS = 4

_BYTES_OF_TEXT = set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}  # the others are in no UTF-8


class PromptEncoder:
    """A tokenizer for text from clients. Threads may share it.

    `bytes_per_token`: bytes of text that one token may stand for.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bytes_per_token = _bytes_per_token(tokenizer)

    def encode(
        self, text: str, max_len: int, *, name: str = "text_input", add_special_tokens: bool = True
    ) -> list[int]:
        """The ids of a prompt after which one more token fits in `max_len`. `name` is the client's for it.

        Raises:
            RequestError: it has no tokens, or too many.
        """
        self._check_bytes(len(text.encode()), max_len, name)
        # `encode` would hold Python's lock throughout, and with it every stream; the batch call does not.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if len(encoding) == 0:
            raise RequestError(f"'{name}' has no tokens; allowed is text of at least one token")
        check_length(len(encoding), max_len, name)
        ids: list[int] = encoding.ids
        return ids

    def bad_words(self, words: Sequence[str], vocab_size: int, *, name: str = "bad_words") -> list[list[int]]:
        """Token ids of each word as it begins a text and, where that begins with another token, as it follows a space.

        Raises RequestError for a word that has no tokens, or one that the model has not. `name` is the client's.
        """
        found = []
        for word in words:
            bare = word.lstrip(" ") or word  # of blanks alone, the blanks are the word
            plain, spaced = self._plain_ids(bare), self._plain_ids(" " + bare)
            found += [plain, spaced] if spaced[:1] != plain[:1] else [plain]
            if not plain:
                raise RequestError(f"'{name}' has {word[:80]!a}, which has no tokens; allowed are texts that have")
            if max(plain) >= vocab_size:
                raise RequestError(
                    f"'{name}' has {word[:80]!a}, which has a token that the model has not; allowed are ids below "
                    f"{vocab_size}"
                )
        return [ids for ids in found if ids]

    def _plain_ids(self, text: str) -> list[int]:
        """Without what the tokenizer puts before and after a prompt."""
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _check_bytes(self, num_bytes: int, max_len: int, name: str) -> None:
        allowed = (max_len - 1) * self.bytes_per_token
        if num_bytes > allowed:
            raise RequestError(
                f"'{name}' has {num_bytes} bytes; allowed are at most {allowed}, "
                f"which is {max_len - 1} tokens of {self.bytes_per_token} bytes"
            )


def check_length(num_tokens: int, max_len: int, name: str) -> None:
    """Raises RequestError for a prompt after which no token fits."""
    if num_tokens >= max_len:
        raise RequestError(
            f"'{name}' has {num_tokens} tokens; allowed are at most {max_len - 1}, so that one more fits in {max_len}"
        )


def _bytes_per_token(tokenizer: Tokenizer) -> int:
    parts = json.loads(tokenizer.to_str())
    added = {token["content"] for token in parts["added_tokens"]}
    # A byte-level vocabulary spells each byte as one character.
    size = len if "ByteLevel" in _types(parts["pre_tokenizer"], "pretokenizers") else _utf8_len
    longest = max(_utf8_len(token) if token in added else size(token) for token in tokenizer.get_vocab())
    return longest if _keeps_all(parts) else longest * _SHRINKS


def _utf8_len(text: str) -> int:
    return len(text.encode())


def _keeps_all(parts: dict[str, Any]) -> bool:
    """Whether each byte of a text is in some token."""
    model, vocabulary = parts["model"], parts["model"].get("vocab", {})
    if model["type"] != "BPE" or any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]):
        return False
    if not all(_keeps_bytes(each) for each in _flat(parts["normalizer"], "normalizers")):
        return False
    cutters = _flat(parts["pre_tokenizer"], "pretokenizers")
    if any(each["type"] not in ("ByteLevel", "Split") or each.get("behavior") == "Removed" for each in cutters):
        return False
    if "ByteLevel" in _types(parts["pre_tokenizer"], "pretokenizers"):
        return set(ByteLevel.alphabet()) <= vocabulary.keys()
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in _BYTES_OF_TEXT)


def _keeps_bytes(normalizer: dict[str, Any]) -> bool:
    is_space_mark = normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "}
    return normalizer["type"] == "Prepend" or (is_space_mark and bool(normalizer["content"]))


def _types(part: dict[str, Any] | None, children: str) -> set[str]:
    return {each["type"] for each in _flat(part, children)}


def _flat(part: dict[str, Any] | None, children: str) -> list[dict[str, Any]]:
    """A part of a tokenizer as a list, sequences taken apart."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [each for child in part[children] for each in _flat(child, children)]
