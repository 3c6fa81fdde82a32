"""SentencePiece's BPE from GGUF metadata: pieces with scores, and bytes for what no piece covers.

SentencePiece joins, again and again, the two neighbours whose joint piece has the highest score. That is BPE whose
merges are all the ways to make a piece of two, best score first.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from backend_lib.checkpoint.fields import Fields
from backend_lib.checkpoint.gguf_token_types import TokenType, token_types
from backend_lib.checkpoint.untrusted import parser_errors

SPACE = "▁"


def sentencepiece_bpe(fields: Fields, tokens: list[str]) -> Tokenizer:
    """Raises ValueError naming damaged metadata."""
    types = token_types(fields, tokens)
    scores = fields.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ValueError(f"{fields.source}: {len(scores)} values of 'tokenizer.ggml.scores' for {len(tokens)} tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pieces = {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == TokenType.NORMAL}
    unknown = next((t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None)
    with parser_errors(f"{fields.source}: 'tokenizer.ggml.tokens' make no tokenizer"):
        model = BPE(vocabulary, _merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
        tokenizer = Tokenizer(model)
    has_prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if has_prefix else spaces
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """Of equal scores, the pair with the longer left part comes first, as in transformers' conversion."""
    merges = [
        (score, cut, piece)
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort(key=lambda merge: (-merge[0], -merge[1], -len(merge[2])))
    return [(piece[:cut], piece[cut:]) for _, cut, piece in merges]
