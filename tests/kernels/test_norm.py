"""RMS norm and the additions before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.norm import add_norm, reference_add_norm
from tests.support.poison import poisoned, poisoned_output

TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-6}


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 4), size=st.integers(1, 70), dtype=st.sampled_from(list(TOLERANCE)),
    added=st.sampled_from(["nothing", "addend", "norm"]), seed=st.integers(0, 2**31),
    magnitude=st.sampled_from([1e-4, 1.0, 3e3]),
)  # fmt: skip
def test_as_the_reference(tokens: int, size: int, dtype: torch.dtype, added: str, seed: int, magnitude: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = magnitude * torch.randn(tokens, size, generator=generator)
    addend = poisoned((magnitude * torch.randn(tokens, size, generator=generator)).to(dtype))
    weight, addend_weight = torch.randn(2, size, generator=generator)
    out = poisoned_output(tokens, size, dtype=dtype)
    arguments = None if added == "nothing" else addend.view, weight, 1e-5
    second = addend_weight if added == "norm" else None
    expected_hidden, expected = hidden.clone(), torch.empty(tokens, size)
    reference_add_norm(expected_hidden, *arguments, addend_weight=second, out=expected)
    add_norm(hidden, *arguments, addend_weight=second, out=out.view)
    torch.testing.assert_close(hidden, expected_hidden, rtol=1e-6, atol=1e-6 * magnitude)
    torch.testing.assert_close(out.view.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for each in (addend, out):
        each.assert_rest_unchanged()


def test_nothing_added_leaves_hidden_as_it_was() -> None:
    hidden = torch.randn(3, 40)
    before = hidden.clone()
    add_norm(hidden, None, torch.ones(40), 1e-6, out=torch.empty(3, 40))
    assert torch.equal(hidden, before)


def test_a_row_of_zeros_is_zero_and_a_nan_stays_in_its_row() -> None:
    hidden = torch.stack([torch.zeros(24), torch.ones(24), torch.full((24,), float("nan"))])
    out = add_norm(hidden, None, torch.ones(24), 1e-6, out=torch.empty(3, 24))
    assert (out[0] == 0).all() and torch.allclose(out[1], torch.ones(24)) and out[2].isnan().all()


def test_a_layout_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(AssertionError):
        add_norm(torch.zeros(4, 6).T, None, torch.ones(4), 1e-6, out=torch.empty(6, 4))
