"""Steps replayed from graphs, which hold memory and numbers of the time of their capture, give the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.worker.machine import build_machine
from tests.support.families import make_variant
from tests.support.recorded_graphs import recorded_graphs
from tests.support.requests import serve

MAX_POSITION = 40


def tokens(path: Path, **settings: str) -> list[list[int]]:
    shape = {"max_running": 5, "prefill_chunk": 16, "kv_tokens": 80, "max_model_len": MAX_POSITION}
    asked = Settings(model=str(path), threads=1, **shape, **settings)
    machine = build_machine(open_checkpoint(str(path)), asked, MAX_POSITION, kv_tokens=80)
    return serve(machine, asked, MAX_POSITION, count=8, seed=2, special=0.1)


@pytest.mark.parametrize(
    "variant", ["llama", *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma2", "qwen3 moe"))]
)
def test_the_same_tokens(variant: str, tmp_path: Path) -> None:
    path = make_variant(tmp_path, variant, num_hidden_layers=1 if variant == "llama" else 2)
    with recorded_graphs() as recordings:
        replayed = tokens(path, device="interpret", dtype="float32")
    assert len(recordings) == 8  # of the decoder and of the draw, for 1, 2, 4 and 5 rows
    assert replayed == tokens(path, device="cpu", weights="fp32")
