"""Byte-level BPE from GGUF metadata, which name the pre-tokenizer (`tokenizer.ggml.pre`) instead of writing it out."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from backend_lib.checkpoint.fields import Fields
from backend_lib.checkpoint.untrusted import parser_errors

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"
# Words end where a capital begins: o200k's cut (GPT-4o), and Mistral's, which has no contractions and single digits.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SINGLE_DIGITS = (r"\p{N}{1,3}", r"\p{N}")


def _split(*patterns: str) -> PreTokenizer:
    """Cut by each pattern in turn, then write bytes as the characters that byte-level BPE uses."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "dbrx": lambda: _split(_LLAMA3),
    "deepseek-r1-qwen": lambda: _split(_LLAMA3.replace(*_SINGLE_DIGITS)),
    "default": lambda: _split(_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9]{3}"),
    "gpt-2": lambda: _split(_GPT2),
    "gpt-4o": lambda: _split(_O200K),
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_LLAMA3.replace(*_SINGLE_DIGITS)),
    "smollm": lambda: _split(r"\p{N}", _GPT2),
    "tekken": lambda: _split(_O200K.replace(_CONTRACTION, "").replace(*_SINGLE_DIGITS)),
}
# Their vocabularies hold whole words that the merges do not lead to.
_IGNORE_MERGES = frozenset({"llama-bpe", "tekken"})
BOS_BY_DEFAULT = frozenset({"llama-bpe", "tekken"})
_NFC = frozenset({"deepseek-r1-qwen", "qwen2"})


def pre_tokenizer_name(fields: Fields) -> str:
    """Raises ValueError naming a pre-tokenizer that is not supported."""
    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise fields.error("tokenizer.ggml.pre", ", ".join(f"'{each}'" for each in PRE_TOKENIZERS))
    return name


def byte_level_bpe(fields: Fields, tokens: list[str]) -> Tokenizer:
    """Raises ValueError naming a pre-tokenizer that is not supported, or damaged metadata."""
    name = pre_tokenizer_name(fields)
    tokenizer = Tokenizer(_model(fields, tokens, ignore_merges=name in _IGNORE_MERGES))
    if name in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _model(fields: Fields, tokens: list[str], *, ignore_merges: bool) -> BPE:
    merges = [_pair(merge) for merge in fields.strings("tokenizer.ggml.merges")]
    with parser_errors(f"{fields.source}: 'tokenizer.ggml.merges' do not fit the tokens"):
        return BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=ignore_merges)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
