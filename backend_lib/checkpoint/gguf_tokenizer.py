"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, processors

from backend_lib.checkpoint.fields import Fields
from backend_lib.checkpoint.gguf_bpe import BOS_BY_DEFAULT, byte_level_bpe, pre_tokenizer_name
from backend_lib.checkpoint.gguf_sentencepiece import SPACE, sentencepiece_bpe
from backend_lib.checkpoint.gguf_token_types import TokenType, token_types

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"


def build_tokenizer(fields: Fields) -> Tokenizer:
    """Raises ValueError naming a tokenizer model or pre-tokenizer that is not supported, or damaged metadata."""
    kind = fields.text("tokenizer.ggml.model")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise fields.error("tokenizer.ggml.model", "'gpt2' (byte-level BPE), 'llama' (SentencePiece)")
    tokens = fields.strings("tokenizer.ggml.tokens")
    types = token_types(fields, tokens)
    if kind == _SENTENCEPIECE:
        # What is never split is looked for before spaces are rewritten.
        tokens = [
            t.replace(SPACE, " ") if each == TokenType.USER_DEFINED else t
            for t, each in zip(tokens, types, strict=True)
        ]
        tokenizer, adds_bos = sentencepiece_bpe(fields, tokens), True
    else:
        tokenizer, adds_bos = byte_level_bpe(fields, tokens), pre_tokenizer_name(fields) in BOS_BY_DEFAULT
    _add_special_tokens(tokenizer, tokens, types)
    _add_bos(tokenizer, fields, tokens, default=adds_bos)
    return tokenizer


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special: left out of decoded text. User-defined ones are only never split."""
    of_type = {kind: [t for t, each in zip(tokens, types, strict=True) if each == kind] for kind in TokenType}
    special = of_type[TokenType.UNKNOWN] + of_type[TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in of_type[TokenType.USER_DEFINED]])


def _add_bos(tokenizer: Tokenizer, fields: Fields, tokens: list[str], *, default: bool) -> None:
    if not fields.flag("tokenizer.ggml.add_bos_token", default):
        return
    bos_id = fields.whole("tokenizer.ggml.bos_token_id", low=0)
    if bos_id >= len(tokens):
        raise fields.error("tokenizer.ggml.bos_token_id", f"a token id below {len(tokens)}")
    bos = tokens[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
    )
