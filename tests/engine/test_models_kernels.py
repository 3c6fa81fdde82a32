"""The GPU's kernels as a whole decoder, in Triton's interpreter, against the same decoder in eager torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models.load import build_decoder
from tests.support.families import VARIANTS, make_variant
from tests.support.forward import logits_in_random_steps

# Head norms; soft caps, windows, post norms and scaled embeddings; a rotation of part of a head, fused projections.
QUICK = ["qwen3", "gemma2", "phi3"]


def sequences(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(2, 512, n).tolist() for n in lengths]


def largest_difference(path: Path, dtype: str) -> float:
    """Of the logits of chunks and single tokens in mixed steps."""
    checkpoint = open_checkpoint(str(path))
    ids = sequences(1, 12, 15)
    decoders = [
        build_decoder(checkpoint, Settings(**settings))
        for settings in ({"device": "interpret", "dtype": dtype}, {"device": "cpu", "weights": "fp32"})
    ]
    ours, theirs = (torch.cat(logits_in_random_steps(decoder, ids)) for decoder in decoders)
    assert ours.dtype == torch.float32 and float(theirs.std()) > 0.3
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("variant", QUICK)
def test_logits(variant: str, tmp_path: Path) -> None:
    assert largest_difference(make_variant(tmp_path, variant), "float32") < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in QUICK])
def test_logits_of_every_family(variant: str, tmp_path: Path) -> None:
    assert largest_difference(make_variant(tmp_path, variant), "float32") < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("variant", ["gemma2"])
def test_logits_in_16_bits(variant: str, tmp_path: Path) -> None:
    assert largest_difference(make_variant(tmp_path, variant), "float16") < 5e-2
