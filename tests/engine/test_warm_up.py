"""What the steps before the first request leave behind."""

from __future__ import annotations

from pathlib import Path

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import PROMPT_LOGPROBS_PER_STEP, Settings
from backend_lib.worker.machine import build_machine
from backend_lib.worker.warm_up import warm_up
from tests.support.checkpoints import make_tiny_llama


def test_padding_is_greedy(tmp_path: Path) -> None:
    """Whatever was run last on the spare row, no noise is made for it."""
    checkpoint = open_checkpoint(str(make_tiny_llama(tmp_path)))
    settings = Settings(model=str(tmp_path), threads=1, device="cpu", weights="fp32", max_running=2)
    runner = build_machine(checkpoint, settings, 400, kv_tokens=500).runner
    warm_up(runner, [PROMPT_LOGPROBS_PER_STEP + 1], everything=True)
    assert runner._sampler._params.temperature[runner.spare_row] == 0
