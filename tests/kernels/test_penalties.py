"""Penalties on logits, and the counters behind them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.worker.eager_sampling import EagerSampling
from backend_lib.worker.sampling import Counters
from kernels import penalties
from kernels.penalties import apply_penalties, count_tokens, reference_apply_penalties, reference_count_tokens
from tests.support.compiling import run_compiling
from tests.support.poison import poisoned


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(penalties, "BLOCK", 32)
    monkeypatch.setattr(penalties, "COUNT_BLOCK", 2)


@settings(max_examples=40, deadline=None)
@given(penalised=st.integers(0, 4), vocab_size=st.integers(1, 100), seed=st.integers(0, 1 << 30))
def test_as_the_reference_and_the_cpu(penalised: int, vocab_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(5, vocab_size, generator=generator)
    logits[:, ::7] = -torch.inf
    places, rows = (torch.randperm(size, generator=generator)[:penalised] for size in (5, 9))
    counters = Counters(
        factors=0.1 + 2 * torch.rand(9, 3, generator=generator),
        counts=torch.randint(0, 3, (9, vocab_size), generator=generator).int(),
        in_prompt=torch.rand(9, vocab_size, generator=generator) < 0.3,
    )
    theirs, on_cpu, kept = logits.clone(), logits.clone(), poisoned(logits.reshape(1, -1), between=64)
    ours = kept.view[0].view(logits.shape)
    apply_penalties(ours, places, rows, *counters)
    kept.assert_rest_unchanged()
    reference_apply_penalties(theirs, places, rows, *counters)
    EagerSampling().penalise(on_cpu, places, rows, counters)
    assert torch.equal(ours, theirs) and torch.equal(ours, on_cpu)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, 9), seed=st.integers(0, 1 << 30))
def test_counters(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(9, generator=generator)[:count]
    token_ids = torch.randint(0, 20, (count,), generator=generator)
    tables = [torch.randint(0, 5, (9, 20), generator=torch.Generator().manual_seed(seed)).int() for _ in range(2)]
    count_tokens(token_ids, rows, tables[0])
    reference_count_tokens(token_ids, rows, tables[1])
    assert torch.equal(*tables)


def test_a_gpu_rounds_as_the_cpu_does() -> None:
    """The interpreter rounds each product, a compiler fuses it with a sum if it may."""
    rows = run_compiling("--only", "penalties", "--jobs", "1")
    assert {row["sm"] for row in rows} == {80, 90, 100}
    assert all(not row["error"] and "fma" not in row["instructions"] for row in rows), rows
