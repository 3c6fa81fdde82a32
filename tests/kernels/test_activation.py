"""Gated activations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.models.eager import ACTIVATIONS
from kernels import activation
from kernels.activation import KINDS, gated, reference_gated
from kernels.tuning import Config
from tests.support.poison import poisoned, poisoned_output

# The interpreter's numpy tells of infinities, which are meant.
pytestmark = pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows take several, and the last one is not full."""
    monkeypatch.setattr(activation, "_config", lambda size: Config({"BLOCK": 16}, 4, 1))


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 4), size=st.integers(1, 70), dtype=st.sampled_from([torch.float16, torch.float32]),
    kind=st.sampled_from(KINDS), seed=st.integers(0, 2**31), magnitude=st.sampled_from([1e-3, 1.0, 20.0, 200.0]),
)  # fmt: skip
def test_as_the_reference(tokens: int, size: int, dtype: torch.dtype, kind: str, seed: int, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    gate_up = poisoned((magnitude * torch.randn(tokens, 2 * size, generator=generator)).to(dtype))
    out = poisoned_output(tokens, size, dtype=dtype)
    expected = reference_gated(gate_up.view, torch.empty(tokens, size, dtype=torch.float64), kind=kind)
    gated(gate_up.view, out.view, kind=kind)
    rtol, atol = (1e-3, 1e-7) if dtype == torch.float16 else (2e-5, 1e-12)
    torch.testing.assert_close(out.view, expected.to(dtype), rtol=rtol, atol=atol)
    out.assert_rest_unchanged()


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_inputs_are_finite(kind: str) -> None:
    gate = torch.tensor([3e38, -3e38, 1e4, -1e4, 100.0, -100.0, 0.0])
    out = gated(torch.cat([gate, torch.ones(7)])[None], torch.empty(1, 7), kind=kind)[0]
    assert torch.equal(out, gate.clamp(min=0))


def test_the_kinds_are_those_of_the_models() -> None:
    assert set(KINDS) == set(ACTIVATIONS)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(AssertionError, match="relu"):
        gated(torch.ones(1, 2), torch.empty(1, 1), kind="relu")
