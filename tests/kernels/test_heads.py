"""Norms of heads, rotation, and keys and values into the pool."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.checkpoint import RopeConfig
from backend_lib.models.rope import Rope
from kernels import heads
from kernels.heads import place_heads, reference_place_heads
from kernels.tuning import Config
from tests.support.poison import poisoned

PLACES = 12  # of a pool, with its spare


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a token's heads take several, and the last one is not full."""
    monkeypatch.setattr(heads, "chosen", lambda kernel, key, default: Config({"HEADS": 4}, 4, 1))


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(0, 4), keys=st.integers(1, 3), group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 6, 8, 20, 32]),
    rotated=st.sampled_from([0.0, 0.5, 1.0]), normed=st.booleans(), seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float16, torch.float32]),
)  # fmt: skip
def test_as_the_reference(
    tokens: int, keys: int, group: int, head_dim: int, rotated: float, normed: bool, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    queries, half = keys * group, int(rotated * head_dim) // 2
    qkv = poisoned(torch.randn(tokens, queries + 2 * keys, head_dim, generator=generator).to(dtype))
    pool = torch.full((PLACES, 2, keys, head_dim), float("nan"), dtype=dtype)
    kv_index = torch.randperm(PLACES, generator=generator)[:tokens]
    options = {
        "norm_weight": torch.randn(queries + keys, head_dim, generator=generator) if normed else None,
        "eps": 1e-5,
        "cos": torch.randn(tokens, half, generator=generator) if half else None,
        "sin": torch.randn(tokens, half, generator=generator) if half else None,
    }
    expected_qkv, expected_pool = qkv.view.clone(), pool.clone()
    reference_place_heads(expected_qkv, expected_pool, kv_index, **options)
    place_heads(qkv.view, pool, kv_index, **options)
    tolerance = 2e-3 if dtype == torch.float16 else 2e-6
    torch.testing.assert_close(qkv.view, expected_qkv, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool, expected_pool, rtol=tolerance, atol=tolerance, equal_nan=True)
    qkv.assert_rest_unchanged()


def test_as_the_decoders_rotation() -> None:
    """What the CPU's decoder does to the same heads, with half of each rotated."""
    rope = Rope(RopeConfig(dim=8, theta=1e4), 100)
    positions = torch.tensor([0, 5, 77])
    qkv, pool = torch.randn(3, 4, 16), torch.zeros(PLACES, 2, 1, 16)
    expected = qkv.clone()
    rope.rotate_(expected[:, :3], *rope.at(positions))
    cos, signed_sin = (each[:, 0, -4:].contiguous() for each in rope.at(positions))
    place_heads(qkv, pool, torch.tensor([3, 0, 11]), cos=cos, sin=signed_sin)
    torch.testing.assert_close(qkv[:, :2], expected[:, :2])
    torch.testing.assert_close(pool[[3, 0, 11]].flatten(1, 2), expected[:, 2:])


def test_keys_and_values_in_the_projection_stay_and_other_places_of_the_pool_too() -> None:
    qkv, pool = torch.randn(2, 8, 16), torch.randn(PLACES, 2, 2, 16)
    kept, before = qkv[:, 4:].clone(), pool.clone()
    place_heads(qkv, pool, torch.tensor([7, 2]), norm_weight=torch.ones(6, 16), eps=1e-6)
    assert torch.equal(qkv[:, 4:], kept)
    untouched = [place for place in range(PLACES) if place not in (7, 2)]
    assert torch.equal(pool[untouched], before[untouched]) and torch.equal(pool[[7, 2], 1], kept[:, 2:])


def test_a_pool_of_another_dtype() -> None:
    qkv, pool = torch.randn(2, 3, 8), torch.zeros(PLACES, 2, 1, 8, dtype=torch.float16)
    place_heads(qkv, pool, torch.tensor([1, 2]))
    assert torch.equal(pool[1:3].flatten(1, 2), qkv[:, 1:].half())
