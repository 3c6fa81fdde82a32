"""A tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, processors

from backend_lib.checkpoint.fields import Fields
from backend_lib.checkpoint.gguf_bpe import BOS_BY_DEFAULT, byte_level_bpe, pre_tokenizer_name
from backend_lib.checkpoint.gguf_sentencepiece import SPACE, sentencepiece_bpe
from backend_lib.checkpoint.gguf_token_types import TokenType, token_types
from backend_lib.checkpoint.untrusted import parser_errors, shown

# Published vocabularies have tokens of up to some 130 characters. Finding the merges of one takes its length squared.
_MAX_TOKEN_CHARACTERS = 1 << 10
_MAX_CHARACTERS = 1 << 24
_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"


def build_tokenizer(fields: Fields) -> Tokenizer:
    """Raises ValueError naming a tokenizer model or pre-tokenizer that is not supported, or damaged metadata."""
    kind = fields.text("tokenizer.ggml.model")
    if kind not in (_BYTE_LEVEL, _SENTENCEPIECE):
        raise fields.error("tokenizer.ggml.model", "'gpt2' (byte-level BPE), 'llama' (SentencePiece)")
    tokens = _tokens(fields)
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
    _add_special_tokens(tokenizer, fields, tokens, types)
    _add_bos(tokenizer, fields, tokens, default=adds_bos)
    return tokenizer


def _tokens(fields: Fields) -> list[str]:
    tokens = fields.strings("tokenizer.ggml.tokens")
    lengths = [len(token) for token in tokens]
    if not tokens or max(lengths) > _MAX_TOKEN_CHARACTERS or sum(lengths) > _MAX_CHARACTERS:
        raise ValueError(
            f"{fields.source}: 'tokenizer.ggml.tokens' has {len(tokens)} tokens of up to {max(lengths, default=0)} "
            f"characters, {sum(lengths)} in all; supported are at least one token, at most {_MAX_TOKEN_CHARACTERS} "
            f"characters each and {_MAX_CHARACTERS} in all"
        )
    return tokens


def _add_special_tokens(tokenizer: Tokenizer, fields: Fields, tokens: list[str], types: list[int]) -> None:
    """Control tokens are special: left out of decoded text. User-defined ones are only never split."""
    of_type = {kind: [t for t, each in zip(tokens, types, strict=True) if each == kind] for kind in TokenType}
    with parser_errors(f"{fields.source}: 'tokenizer.ggml.token_type' does not fit the tokens"):
        _add_tokens(tokenizer, of_type)


def _add_tokens(tokenizer: Tokenizer, of_type: dict[TokenType, list[str]]) -> None:
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
    with parser_errors(f"{fields.source}: 'tokenizer.ggml.bos_token_id' is {bos_id}, the token {shown(bos)}"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, bos_id)]
        )
