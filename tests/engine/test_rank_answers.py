"""Several ranks give the answers that one gives, to requests of every kind: real processes, the hash model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.all_fields import RECORD_BYTES, Answer, Ask, answers, random_asks, undisturbed
from tests.support.checkpoints import make_hash_checkpoint
from tests.support.engine import VOCAB
from tests.support.played import played_group
from tests.support.random_load import MAX_LEN, MAX_TOKENS

SIZES = {"num_slots": 40, "max_len": MAX_LEN, "max_tokens": MAX_TOKENS, "record_bytes": RECORD_BYTES}
# In each many pause; in the last ones next to nothing fits, and a prompt takes a step a token.
TIGHT: list[dict[str, Any]] = [
    {"tensor_parallel": 2, "agreement": "arena", "overlap": "off", "max_running": 16, "kv_tokens": 150},
    {"tensor_parallel": 2, "agreement": "broadcast", "overlap": "on", "max_running": 16, "kv_tokens": 150},
    {"tensor_parallel": 4, "agreement": "arena", "overlap": "on", "max_running": 8, "kv_tokens": 90},
    {"tensor_parallel": 3, "agreement": "broadcast", "overlap": "off", "max_running": 1, "kv_tokens": 60},
    {
        "tensor_parallel": 2, "agreement": "arena", "overlap": "on", "max_running": 4, "kv_tokens": 60,
        "prefill_chunk": 1,
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hash")
    make_hash_checkpoint(folder, vocab_size=VOCAB, eos_token_id=2, max_position=256)
    return folder


def differences(asks: list[Ask], got: list[Answer], whole: list[Answer]) -> list[tuple]:
    """An answer may be cut short where the request has been aborted, and differ in nothing else."""
    compared = zip(asks, got, whole, strict=True)
    return [each for each in compared if each[1] != each[2] and not is_cut(*each)]


def is_cut(ask: Ask, got: Answer, whole: Answer) -> bool:
    return ask.abort is not None and got.begins(whole)


def played(checkpoint: Path, asks: list[Ask], **how: Any) -> list[Answer]:
    with played_group(checkpoint, **how, **SIZES) as group:
        return answers(group, asks)


def test_two_ranks_give_the_answers_of_one(checkpoint):
    asks = random_asks(1, 120)
    whole = played(checkpoint, undisturbed(asks), max_running=16, kv_tokens=600)
    assert len({answer.finish for answer in whole}) >= 5
    assert not differences(asks, played(checkpoint, asks, debug="on", **TIGHT[1]), whole)


@pytest.mark.long
@pytest.mark.parametrize("how", TIGHT, ids=lambda how: f"{how['tensor_parallel']}-{how['agreement']}-{how['overlap']}")
def test_ranks_give_the_answers_of_one_whatever_pauses(checkpoint, how):
    for seed in range(10, 14):
        asks = random_asks(seed, 300)
        whole = played(checkpoint, undisturbed(asks), max_running=16, kv_tokens=600)
        assert not differences(asks, played(checkpoint, asks, debug="on", **how), whole)
