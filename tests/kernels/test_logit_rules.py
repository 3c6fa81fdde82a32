"""Masks on logits, and values added to single ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.worker.grammar import apply_masks as apply_masks_on_cpu
from kernels import logit_rules
from kernels.logit_rules import add_at, apply_masks, reference_add_at, reference_apply_masks
from tests.support.poison import Poisoned, poisoned


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_rules, "MASK_BLOCK", 64)
    monkeypatch.setattr(logit_rules, "ADD_BLOCK", 8)


def _kept(logits: torch.Tensor) -> tuple[Poisoned, torch.Tensor]:
    """A contiguous copy with rubbish before and after it."""
    kept = poisoned(logits.reshape(1, -1), between=64)
    return kept, kept.view[0].view(logits.shape)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 6), masked=st.integers(0, 6), vocab_size=st.integers(1, 200), seed=st.integers(0, 1 << 30))
def test_masks(rows: int, masked: int, vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator)
    places = torch.randperm(rows, generator=generator)[:masked]
    width = -(-vocab_size // 32)
    masks = torch.randint(-(1 << 31), 1 << 31, (len(places), width), generator=generator).int()
    theirs, on_cpu = logits.clone(), logits.clone()
    kept, ours = _kept(logits)
    apply_masks(ours, places, masks)
    kept.assert_rest_unchanged()
    reference_apply_masks(theirs, places, masks)
    apply_masks_on_cpu(on_cpu, places.tolist(), masks)
    assert torch.equal(ours, theirs) and torch.equal(ours, on_cpu)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 6), vocab_size=st.integers(1, 50), count=st.integers(0, 40), seed=st.integers(0, 1 << 30))
def test_values(rows: int, vocab_size: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator)
    places = torch.randperm(rows * vocab_size, generator=generator)[:count]
    at = torch.stack([places // vocab_size, places % vocab_size])
    values = torch.randn(len(places), generator=generator)
    values[::3] = -torch.inf
    theirs = logits.clone()
    kept, ours = _kept(logits)
    add_at(ours, at, values)
    kept.assert_rest_unchanged()
    reference_add_at(theirs, at, values)
    assert torch.equal(ours, theirs)
