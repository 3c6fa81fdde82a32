"""A tokenizer from the metadata of a GGUF file.

GGUF names its pre-tokenizer (`tokenizer.ggml.pre`) instead of writing it out, so each name is spelled here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from backend_lib.checkpoint.fields import Fields


class _TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type` that need treatment."""

    CONTROL = 3
    USER_DEFINED = 4


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


def _split(*patterns: str) -> PreTokenizer:
    """Cut by each pattern in turn, then write bytes as the characters that byte-level BPE uses."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "default": lambda: _split(_PUNCTUATION, _GPT2, r"\p{N}+", r"[0-9]{3}"),
    "gpt-2": lambda: _split(_GPT2),
    "smollm": lambda: _split(r"\p{N}", _GPT2),
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}
# Their vocabularies hold whole words that the merges do not lead to.
_IGNORE_MERGES = frozenset({"llama-bpe"})
_BOS_BY_DEFAULT = frozenset({"llama-bpe"})
_NFC = frozenset({"qwen2"})


def build_tokenizer(fields: Fields) -> Tokenizer:
    """Raises ValueError naming a tokenizer model or pre-tokenizer that is not supported, or damaged metadata."""
    if fields.text("tokenizer.ggml.model") != "gpt2":
        raise fields.error("tokenizer.ggml.model", "'gpt2' (byte-level BPE)")
    pre = fields.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise fields.error("tokenizer.ggml.pre", ", ".join(f"'{name}'" for name in _PRE_TOKENIZERS))
    tokens = _strings(fields, "tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(fields, tokens, ignore_merges=pre in _IGNORE_MERGES))
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, fields, tokens)
    _add_bos(tokenizer, fields, tokens, default=pre in _BOS_BY_DEFAULT)
    return tokenizer


def _strings(fields: Fields, key: str) -> list[str]:
    values = fields.values.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.error(key, "a list of strings")
    return values


def _bpe(fields: Fields, tokens: list[str], *, ignore_merges: bool) -> BPE:
    merges = [_pair(merge) for merge in _strings(fields, "tokenizer.ggml.merges")]
    try:
        return BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=ignore_merges)
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise ValueError(f"{fields.source}: 'tokenizer.ggml.merges' do not fit the tokens: {error}") from None


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_special_tokens(tokenizer: Tokenizer, fields: Fields, tokens: list[str]) -> None:
    """Control tokens are special: left out of decoded text. User-defined ones are only never split."""
    types = fields.values.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ValueError(
            f"{fields.source}: {len(types)} values of 'tokenizer.ggml.token_type' for {len(tokens)} tokens"
        )
    of_type = {kind: [t for t, each in zip(tokens, types, strict=True) if each == kind] for kind in _TokenType}
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in of_type[_TokenType.CONTROL]])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in of_type[_TokenType.USER_DEFINED]])


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
