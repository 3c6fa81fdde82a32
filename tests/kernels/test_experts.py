"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import experts as module
from kernels.activation import KINDS
from kernels.experts import Workspace, experts, reference_experts
from kernels.tuning import Config
from tests.support.poison import poisoned, poisoned_output

_SMALL = {
    "sort_pairs": {"BLOCK": 16}, "sum_parts": {"BLOCK": 16}, "experts": {"COLUMNS": 16, "INNER": 16, "GROUP": 2},
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that everything takes several, and the last one is not full."""
    monkeypatch.setattr(module, "tuned", lambda kernel, key, default: Config(_SMALL[kernel], 4, 1))
    yield


def _workspace(tokens: int, used: int, down: torch.Tensor, dtype: torch.dtype) -> Workspace:
    num_experts, hidden_size, intermediate_size = down.shape
    workspace = Workspace.allocate(
        max_tokens=tokens, used=used, num_experts=num_experts, hidden_size=hidden_size,
        intermediate_size=intermediate_size, dtype=dtype, device="cpu",
    )  # fmt: skip
    for each in (workspace.inner, workspace.parts):
        each.fill_(float("nan"))
    for each in (workspace.tile_expert, workspace.num_tiles):
        each.fill_(0x5C5C5C5C)
    workspace.sorted_pairs.zero_()  # a pair that exists: whoever takes it for one of his spoils it
    return workspace


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 12), used=st.integers(1, 3), more=st.integers(0, 6), hidden_size=st.integers(1, 40),
    intermediate_size=st.integers(1, 40), dtype=st.sampled_from([torch.float16, torch.float32]),
    kind=st.sampled_from(KINDS), one_expert=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_as_the_reference(
    tokens: int, used: int, more: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype, kind: str,
    one_expert: bool, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    num_experts = used + more

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    x = poisoned(normal(tokens, hidden_size).mul(hidden_size**0.5).to(dtype))
    scores = torch.rand(tokens, num_experts, generator=generator)
    if one_expert:  # all tokens crowd one, and others get nothing
        scores[:, num_experts // 2] = 2
    weights, chosen = scores.topk(used)
    weights = weights.contiguous()
    gate_up = normal(num_experts, 2 * intermediate_size, hidden_size).to(dtype)
    down = normal(num_experts, hidden_size, intermediate_size).to(dtype)
    out = poisoned_output(tokens, hidden_size, dtype=torch.float32)
    expected = reference_experts(x.view, chosen, weights, gate_up, down, kind=kind, out=torch.empty(x.view.shape))
    workspace = _workspace(tokens, used, down, dtype)
    experts(x.view, chosen, weights, gate_up, down, kind=kind, workspace=workspace, out=out.view)
    tolerance = 5e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out.view, expected, rtol=tolerance, atol=tolerance)
    for each in (x, out):
        each.assert_rest_unchanged()


def _case(tokens: int, num_experts: int) -> tuple[torch.Tensor, ...]:
    """x, the chosen two, their weights, gate and up, down."""
    generator = torch.Generator().manual_seed(7)
    scores, chosen = torch.rand(tokens, num_experts, generator=generator).topk(2)
    shapes = (tokens, 24), (num_experts, 40, 24), (num_experts, 24, 20)
    x, gate_up, down = (torch.randn(*shape, generator=generator) / 4 for shape in shapes)
    return x, chosen, scores, gate_up, down


@pytest.mark.parametrize(("tokens", "rows"), [(24, 16), (95, 64), (200, 128)])
def test_every_size_of_tile(tokens: int, rows: int) -> None:
    x, chosen, weights, gate_up, down = _case(tokens, 3)
    assert module._tile_rows(chosen.numel(), 3) == rows
    counts = chosen.flatten().bincount()
    assert counts.max() > rows and (counts % rows).any()  # several tiles, not all of them full
    expected = reference_experts(x, chosen, weights, gate_up, down, kind="silu", out=torch.empty_like(x))
    workspace = _workspace(tokens, 2, down, x.dtype)
    out = experts(x, chosen, weights, gate_up, down, kind="silu", workspace=workspace, out=torch.empty_like(x))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_workspace_serves_steps_of_any_size_up_to_its_own() -> None:
    x, chosen, weights, gate_up, down = _case(9, 5)
    workspace = _workspace(9, 2, down, x.dtype)
    for tokens in (9, 1, 4):
        part = x[:tokens], chosen[:tokens], weights[:tokens], gate_up, down
        out = experts(*part, kind="silu", workspace=workspace, out=torch.full((tokens, 24), float("nan")))
        expected = reference_experts(*part, kind="silu", out=torch.empty(tokens, 24))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="fewer tokens"):
        experts(*_case(10, 5), kind="silu", workspace=workspace, out=torch.empty(10, 24))


def test_a_nan_stays_with_its_token_and_a_run_repeats_bit_for_bit() -> None:
    x, chosen, weights, gate_up, down = _case(9, 3)
    clean, again, spoilt = (torch.empty_like(x) for _ in range(3))
    for out in (clean, again):
        experts(x, chosen, weights, gate_up, down, kind="silu", workspace=_workspace(9, 2, down, x.dtype), out=out)
    x[4] = float("nan")
    experts(x, chosen, weights, gate_up, down, kind="silu", workspace=_workspace(9, 2, down, x.dtype), out=spoilt)
    others = [token for token in range(9) if token != 4]
    assert torch.equal(clean, again) and torch.equal(spoilt[others], clean[others]) and spoilt[4].isnan().all()


@settings(max_examples=200, deadline=None)
@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=40).filter(any), rows=st.sampled_from(module._ROWS))
def test_no_choice_takes_more_tiles_than_are_launched(counts: list[int], rows: int) -> None:
    tiles = sum(-(-count // rows) for count in counts)
    most, busy = module._most_tiles(sum(counts), len(counts), rows), min(sum(counts), len(counts))
    assert tiles <= most <= sum(counts) // min(module._ROWS) + busy
    assert most * rows <= sum(counts) + busy * (max(module._ROWS) - 1)
