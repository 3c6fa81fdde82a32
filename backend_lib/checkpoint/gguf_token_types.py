"""What each token of a GGUF file is for."""

from __future__ import annotations

from enum import IntEnum

from backend_lib.checkpoint.fields import Fields


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def token_types(fields: Fields, tokens: list[str]) -> list[int]:
    """One for each token; all normal where the file does not say. Raises ValueError when there are not as many."""
    types = fields.whole_list("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(
            f"{fields.source}: {len(types)} values of 'tokenizer.ggml.token_type' for {len(tokens)} tokens"
        )
    return types
