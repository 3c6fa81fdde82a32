"""`benchmarks/quality.py` as it is run, on a small random model."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from backend_lib.checkpoint import open_checkpoint
from benchmarks.quality import TEXT, WINDOW, main, windows
from tests.support.families import make_variant

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 2}
TOKENS = 700  # a window and a part of one
# Inputs times outputs of all layers: query, key and value; output; gate and up; down; and the head.
WEIGHTS = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 64 * 2 * 96 + 96 * 64) + 64 * 512


@torch.inference_mode()
def perplexity(path: Path, ids: list[int]) -> float:
    """By transformers, over all tokens but each window's first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    losses = []
    for window in windows(ids, []):
        logits = model(torch.tensor([window])).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none"))
    return math.exp(torch.cat(losses).double().mean())


def test_formats_and_comparators_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_variant(tmp_path / "model", "llama", **SIZES, num_key_value_heads=2)
    tokenizer = open_checkpoint(str(path)).tokenizer
    text = tmp_path / "text"
    text.write_text(tokenizer.decode(tokenizer.encode(TEXT.read_text()).ids[:TOKENS]))
    ids = tokenizer.encode(text.read_text()).ids
    arguments = ["--model", str(path), "--text", str(text), "--threads", "1", "--json", str(tmp_path / "figures")]
    assert main([*arguments, "--weights", "int8"]) == 0
    fp32, int8 = json.loads((tmp_path / "figures").read_text())
    assert (fp32["name"], int8["name"]) == ("fp32", "int8")
    assert fp32["tokens"] == int8["tokens"] == len(ids) - 2 > WINDOW
    assert fp32["perplexity"] == pytest.approx(perplexity(path, ids), rel=1e-4)
    assert fp32["perplexity_rise"] == fp32["mean_difference"] == 0.0
    assert 0.0 < abs(int8["perplexity_rise"]) < 0.01
    assert 1e-4 < int8["mean_difference"] < int8["p99_difference"] < 0.2
    assert fp32["read_bytes"] == 4 * WEIGHTS
    assert int8["read_bytes"] == WEIGHTS * 34 // 32  # a byte each, and a float16 for 32 of them
    assert "+0.00 ± 0.00" in capsys.readouterr().out
