"""Log-probabilities and ranks of tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.worker.logprobs import logprobs_of
from kernels import logprobs
from kernels.logprobs import logprob_stats, reference_logprob_stats
from tests.support.poison import poisoned


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "BLOCK", 16)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 4), vocab_size=st.integers(1, 100), scale=st.sampled_from([0.0, 1.0, 30.0, 3e4]),
    seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_as_the_reference_and_the_cpu(rows: int, vocab_size: int, scale: float, seed: int) -> None:
    """With equals, and with whole parts of a row that a mask has taken out."""
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, vocab_size, generator=generator)).round(decimals=1)
    logits[:, 16:48] = -torch.inf
    token_ids = torch.randint(0, vocab_size, (rows,), generator=generator)
    ours, theirs = (
        {
            "chosen": torch.full((rows,), torch.nan), "log_sum_exp": torch.full((rows,), torch.nan),
            "ranks": torch.full((rows,), -1),
        }
        for _ in range(2)
    )  # fmt: skip
    surrounded = poisoned(logits.reshape(1, -1)).view[0].view(logits.shape)
    outputs = {name: poisoned(each.reshape(1, -1)) for name, each in ours.items()}
    ours = {name: each.view[0] for name, each in outputs.items()}
    logprob_stats(surrounded, token_ids, **ours)
    for each in outputs.values():
        each.assert_rest_unchanged()
    assert torch.equal(surrounded, logits)
    reference_logprob_stats(logits, token_ids, **theirs)
    assert torch.equal(ours["ranks"], theirs["ranks"])
    for name in ("chosen", "log_sum_exp"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-5)
    on_cpu = logprobs_of(logits, token_ids, 1)
    assert torch.equal(on_cpu.ranks, ours["ranks"])
    torch.testing.assert_close(on_cpu.logprobs[:, 0], ours["chosen"], rtol=1e-6, atol=1e-5)
