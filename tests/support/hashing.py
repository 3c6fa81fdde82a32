"""What the test-only model answers, worked out beforehand."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from backend_lib.models.hash_model import _splitmix64_int
from tests.support.checkpoints import hash_text

VOCAB = 1024
EOS_ID = 2
PROMPT_IDS = (5, 6, 7)
_WORD = (1 << 64) - 1
PROMPT = hash_text(list(PROMPT_IDS))
GREEDY = {"temperature": 0, "ignore_eos": True}

# Goes on until somebody ends it; the model gives some hundreds of tokens a second.
ENDLESS = {"temperature": 0, "ignore_eos": True, "max_tokens": 50_000}


def continuation(prompt_ids: Sequence[int], count: int) -> list[int]:
    """The ids that follow a prompt when decoding is greedy and EOS is ignored."""
    total = sum(_term(position, token) for position, token in enumerate(prompt_ids))
    ids = []
    for position in range(len(prompt_ids), len(prompt_ids) + count):
        ids.append((_splitmix64_int(total & _WORD) >> 1) % VOCAB)
        total += _term(position, ids[-1])
    return ids


def _term(position: int, token: int) -> int:
    """What one token adds to the model's hash, which is a sum: so a long text takes no longer per token."""
    return _splitmix64_int((position << 32) + token)


def text_of(ids: Sequence[int]) -> str:
    """The text of output ids: EOS, as a special token, has none."""
    return hash_text([token for token in ids if token != EOS_ID])


def answer(count: int, prompt_ids: Sequence[int] = PROMPT_IDS) -> str:
    """The text of the first `count` tokens after a prompt."""
    return text_of(continuation(prompt_ids, count))


@functools.cache
def prompt_that_ends() -> tuple[list[int], int]:
    """A prompt and after how many tokens EOS comes; it is among the first twelve and not the first three."""
    for first, second in itertools.product(range(3, 100), repeat=2):
        ids = continuation([first, second], 12)
        if EOS_ID in ids[3:] and EOS_ID not in ids[:3]:
            return [first, second], ids.index(EOS_ID) + 1
    raise AssertionError("unreachable")
