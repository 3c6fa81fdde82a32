"""How many tokens of KV cache a GPU is said to hold: what torch tells of its memory is made up here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backend_lib.config import Settings
from backend_lib.worker import machine
from backend_lib.worker.machine import MAX_KV_TOKENS, _Parts
from backend_lib.worker.process_groups import SOLO

GIB = 1 << 30
ON_GPU = SimpleNamespace(device=SimpleNamespace(type="cuda"))


@pytest.fixture
def steps(monkeypatch) -> list[str]:
    """10 GiB are free; the largest step takes 3 GiB more than the 16 that stay, for a moment."""
    done: list[str] = []
    told = {
        "reset_peak_memory_stats": lambda: done.append("reset"), "max_memory_allocated": lambda: 19 * GIB,
        "memory_allocated": lambda: 16 * GIB, "synchronize": lambda: None,
        "empty_cache": lambda: done.append("emptied"), "mem_get_info": lambda: (10 * GIB, 80 * GIB),
    }  # fmt: skip
    for name, answer in told.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(_Parts, "runner", lambda self, kv_tokens: done.append(f"KV of {kv_tokens}"))
    monkeypatch.setattr(machine, "warm_up", lambda runner, lengths, everything: done.append(f"ran {lengths}"))
    return done


def kv_tokens(bytes_per_token: int, **settings) -> int:
    decoder = SimpleNamespace(kv_bytes_per_token=bytes_per_token)
    parts = _Parts(ON_GPU, decoder, None, Settings(device="cuda", **settings), 100_000, True, SOLO)  # type: ignore[arg-type]
    return parts.kv_tokens()


def test_what_the_largest_step_takes_is_left_to_it(steps) -> None:
    assert kv_tokens(1 << 17) == int(0.9 * 7 * GIB) // (1 << 17)
    assert steps == ["reset", "KV of 1", "ran [4096]", "emptied"]
    assert kv_tokens(1 << 17, memory_fraction=0.5) == int(0.5 * 7 * GIB) // (1 << 17)


def test_indices_have_32_bits(steps) -> None:
    assert kv_tokens(1) == MAX_KV_TOKENS


def test_no_room_is_an_error_in_words(steps) -> None:
    with pytest.raises(ValueError, match=r"memory_fraction 0\.9 of what is free leaves no room for a KV cache"):
        kv_tokens(8 * GIB)
