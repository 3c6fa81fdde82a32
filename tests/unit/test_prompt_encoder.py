"""How long a prompt may be before it is tokenised, and that other threads run meanwhile."""

from __future__ import annotations

import threading
import time

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from backend_lib.router.prompt_encoder import PromptEncoder
from backend_lib.router.refusals import RequestError
from tests.support.checkpoints import TINY_VOCAB, tiny_tokenizer


def byte_level(normalizer=None) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    if normalizer:
        tokenizer.normalizer = normalizer
    return tokenizer


def byte_fallback(missing: int | None = None) -> Tokenizer:
    tokens = [f"<0x{byte:02X}>" for byte in range(256) if byte != missing]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def with_stripping_token() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def without_blanks() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def with_long_token() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("x" * 50, normalized=False)])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (byte_level(), 4),  # "</s>"
        (byte_level(normalizers.NFC()), 16),
        (byte_level(normalizers.Strip()), 16),
        (byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])), 16),
        (byte_level(normalizers.Replace("a", "")), 16),
        (byte_fallback(), 6),  # "<0x00>"
        (byte_fallback(missing=0x41), 24),
        (byte_fallback(missing=0xFF), 6),  # no text has it
        (with_stripping_token(), 24),
        (without_blanks(), 16),
        (with_long_token(), 50),
    ],
)
def test_bytes_of_a_token(tokenizer, expected: int) -> None:
    assert PromptEncoder(tokenizer).bytes_per_token == expected


def test_the_longest_text_passes_and_a_byte_more_does_not() -> None:
    encoder = PromptEncoder(with_long_token())
    assert encoder.encode("x" * 50 * 9, 10) == [TINY_VOCAB] * 9
    with pytest.raises(RequestError, match="'text_input' has 451 bytes; allowed are at most 450, which is 9 tokens"):
        encoder.encode("x" * 50 * 9 + "y", 10)


def test_bytes_are_counted_not_characters() -> None:
    with pytest.raises(RequestError, match="has 39 bytes; allowed are at most 36"):
        PromptEncoder(byte_level()).encode("丅" * 13, 10)


def test_other_threads_run_while_a_long_prompt_is_tokenised() -> None:
    encoder, longest = PromptEncoder(byte_level()), 0.0
    thread = threading.Thread(target=encoder.encode, args=("the quick fox " * 200_000, 1 << 30))
    thread.start()
    started = last = time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    assert longest < (last - started) / 2
