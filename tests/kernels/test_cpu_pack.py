"""Weights as codes: what can be had back of them, and how far off the rest is."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.matmul import GROUP
from kernels.cpu.pack import pack
from tests.support.kernels import known_weights, same_bits, unpacked

LARGEST_HALF = 65504.0


def round_trip(weight: np.ndarray, bits: int) -> tuple[np.ndarray, float]:
    packed, error = pack(weight, bits)
    return unpacked(packed, bits, len(weight), weight.shape[1] // GROUP), error


def grid_step(weight: np.ndarray, bits: int) -> np.ndarray:
    """The step of the plainest grid, float64 [out, groups, 1]: what is done must be at least as good."""
    groups = weight.reshape(len(weight), -1, GROUP).astype(np.float64)
    if bits == 8:
        return np.abs(groups).max(-1, keepdims=True) / 127
    return (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / 15


@given(
    seed=st.integers(0, 2**32), outputs=st.integers(1, 40), groups=st.integers(1, 6), bits=st.sampled_from([4, 8]),
    magnitude=st.sampled_from([1e-3, 0.02, 1.0, 300.0]), offset=st.sampled_from([0.0, -3.0, 3.0, 40.0]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_values_are_within_half_a_step(
    seed: int, outputs: int, groups: int, bits: int, magnitude: float, offset: float
) -> None:
    """Rounding takes half a step; float16 takes 2**-11 of the scale, times the codes, and of the least value."""
    random = np.random.default_rng(seed).standard_normal((outputs, groups * GROUP))
    weight = ((random + offset) * magnitude).astype(np.float32)
    ours, error = round_trip(weight, bits)
    difference = (ours.astype(np.float64) - weight).reshape(outputs, groups, GROUP)
    step = grid_step(weight, bits)
    largest = np.abs(weight).reshape(outputs, groups, GROUP).max(-1, keepdims=True)
    scale_error = np.maximum(2.0**-11 * step, 2.0**-25) * (127 if bits == 8 else 15)
    low_error = np.maximum(2.0**-11 * largest, 2.0**-25) if bits == 4 else 0.0
    bound = step / 2 + scale_error + low_error
    if bits == 8:
        assert (np.abs(difference) <= bound * (1 + 1e-4)).all()
    # With 4 bits the better of two grids by its squares: each value of the one taken may be off by more.
    assert ((difference**2).sum(-1) <= GROUP * bound[..., 0] ** 2 * (1 + 1e-4)).all()
    relative = np.sqrt((difference**2).sum() / (weight.astype(np.float64) ** 2).sum())
    assert error == pytest.approx(relative, rel=1e-3, abs=1e-7)


@given(
    seed=st.integers(0, 2**32), outputs=st.integers(1, 40), groups=st.integers(1, 6), bits=st.sampled_from([4, 8]),
    extreme=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_what_is_on_the_grid_comes_back(seed: int, outputs: int, groups: int, bits: int, extreme: bool) -> None:
    weight = known_weights(np.random.default_rng(seed), outputs, groups, bits, extreme=extreme).values
    ours, error = round_trip(weight, bits)
    assert same_bits(ours, weight)
    assert error == 0.0


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("magnitude", [1e-2, 1.0, 100.0])
def test_what_gguf_has_rounded_to_4_bits_comes_back(kind: str, magnitude: float) -> None:
    generator = np.random.default_rng(0)
    random = (generator.standard_normal((50, 8 * GROUP)) * magnitude).astype(np.float32)
    random[0, :GROUP] = np.abs(random[0, :GROUP])  # groups whose largest value is positive, or that lack one
    random[1, :GROUP] = -np.abs(random[1, :GROUP])
    random[2, :GROUP] = 0.0
    quantization = gguf.GGMLQuantizationType[kind]
    weight = gguf.dequantize(gguf.quantize(random, quantization), quantization)
    ours, error = round_trip(weight, 4)
    assert error < 1e-3
    np.testing.assert_allclose(ours, weight, rtol=1e-6, atol=1e-6 * magnitude)
    assert round_trip(random, 4)[1] > 1e-2  # what was not rounded is told from it


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.37, -0.37, 1000.0])
def test_groups_of_one_value(bits: int, value: float) -> None:
    weight = np.full((3, 2 * GROUP), value, np.float32)
    ours, error = round_trip(weight, bits)
    np.testing.assert_allclose(ours, weight, rtol=2.0**-11)
    assert error < 2.0**-11


def test_negative_groups() -> None:
    """4 bits: from the least to the largest, as no value is near zero."""
    generator = np.random.default_rng(0)
    weight = -generator.uniform(1.0, 2.0, (20, 3 * GROUP)).astype(np.float32)
    difference = np.abs(round_trip(weight, 4)[0] - weight)
    assert difference.max() < 1 / 15 / 2 + 2.0**-10
    assert np.abs(round_trip(weight, 8)[0] - weight).max() < 2 / 127 / 2 + 2.0**-10


@pytest.mark.parametrize("bits", [4, 8])
def test_tiny_values_are_zero(bits: int) -> None:
    """Below float16's least, 6e-8, there is no step."""
    weight = np.random.default_rng(0).standard_normal((5, GROUP)).astype(np.float32) * np.float32(1e-30)
    ours, _ = round_trip(weight, bits)
    assert np.abs(ours - weight).max() < 1e-8


def test_huge_values() -> None:
    """8 bits reach to 8 million. With 4, a scale or a least value beyond float16 is clipped, and the error says so."""
    generator = np.random.default_rng(0)
    weight = (generator.uniform(-1, 1, (5, 2 * GROUP)) * 1e6).astype(np.float32)
    ours, error = round_trip(weight, 8)
    assert np.abs(ours - weight).max() <= 1e6 / 127 * 0.6
    assert error < 0.01
    ours, error = round_trip(weight, 4)
    assert np.isfinite(ours).all()
    assert 0.05 < error < 1.0


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_values_that_are_no_numbers_spoil_only_their_group(bits: int, value: float) -> None:
    weight = known_weights(np.random.default_rng(0), 20, 3, bits).values
    spoiled = weight.copy()
    spoiled[7, GROUP + 5] = value
    ours = round_trip(spoiled, bits)[0]
    ours[7, GROUP : 2 * GROUP] = weight[7, GROUP : 2 * GROUP]
    assert same_bits(ours, weight)


def test_outputs_that_fill_up_a_panel_are_zero() -> None:
    for bits in (4, 8):
        packed, _ = pack(known_weights(np.random.default_rng(0), 17, 2, bits).values, bits)
        assert not unpacked(packed, bits, 32, 2)[17:].any()
