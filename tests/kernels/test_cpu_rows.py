"""What works row by row, against float64."""

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import operations
from kernels.cpu.matmul import GROUP
from kernels.cpu.rows import GELU_TANH, SILU
from kernels.cpu.team import Team
from tests.support.kernels import (
    RoundedRows,
    close_all,
    known_weights,
    packed_weights,
    room_for_rows,
    round_rows,
    run,
    same_bits,
)

EPS = 1e-5
FLOAT32 = 1e-5  # relative: a few roundings of float32

sizes = given(seed=st.integers(0, 2**32), count=st.integers(1, 12), groups=st.integers(1, 20))


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    teams = [Team(threads) for threads in (1, 3)]
    yield teams
    close_all(teams)


def random_rows(seed: int, count: int, columns: int) -> np.ndarray:
    """Magnitudes differ by row and by group."""
    generator = np.random.default_rng(seed)
    values = generator.standard_normal((count, columns // GROUP, GROUP))
    values *= 10.0 ** generator.uniform(-2, 2, (count, columns // GROUP, 1))
    return values.reshape(count, columns).astype(np.float32)


def check_rounded(ours: RoundedRows, exact: np.ndarray) -> None:
    """`exact`, float64 [rows, 32 groups], is rounded to 127ths of the largest of each group."""
    groups = exact.reshape(*ours.scales.shape[:2], GROUP)
    largest = np.abs(groups).max(-1)
    np.testing.assert_allclose(ours.scales[..., 0], largest / 127, rtol=FLOAT32)
    difference = np.abs(ours.values - exact).reshape(groups.shape)
    assert (difference <= largest[..., None] * (0.5 / 127 + FLOAT32)).all()
    codes = ours.codes.reshape(groups.shape).astype(np.int64)
    assert (np.abs(codes).max(-1) == np.where(largest > 0, 127, 0)).all()
    sums = ours.scales[..., 0] * codes.sum(-1).astype(np.float32)
    assert same_bits(ours.scales[..., 1], sums)


def same_rows(ours: RoundedRows, theirs: RoundedRows) -> bool:
    return same_bits(ours.codes, theirs.codes) and same_bits(ours.scales, theirs.scales)


@sizes
@settings(max_examples=40, deadline=None)
def test_quantise(teams: list[Team], seed: int, count: int, groups: int) -> None:
    x = random_rows(seed, count, groups * GROUP)
    x[0, :GROUP] = 0.0
    ours = round_rows(teams[0], x)
    check_rounded(ours, x.astype(np.float64))
    assert same_rows(round_rows(teams[1], x), ours)


@pytest.mark.parametrize("magnitude", [1e-24, 1e-20, 1e20, 1e37])
def test_quantise_far_from_one(teams: list[Team], magnitude: float) -> None:
    x = random_rows(0, 5, 4 * GROUP) * np.float32(magnitude / 1000)
    check_rounded(round_rows(teams[0], x), x.astype(np.float64))


@pytest.mark.parametrize("magnitude", [1e-36, 1e-37, 1e-38, 1e-42, 1e-45])
def test_quantise_next_to_zero(teams: list[Team], magnitude: float) -> None:
    """Where 127 over the largest would be infinite, or has few bits left: all is finite, and as good as zero."""
    x = (np.random.default_rng(0).uniform(-1, 1, (5, 4 * GROUP)) * magnitude).astype(np.float32)
    ours = round_rows(teams[0], x)
    assert np.isfinite(ours.scales).all()
    assert (np.abs(ours.values - x) <= 2e-30).all()
    assert np.abs(ours.scales[..., 1]).max() < 1e-28


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_quantise_of_no_numbers_spoils_only_the_group(teams: list[Team], value: float) -> None:
    x = random_rows(0, 3, 3 * GROUP)
    spoiled = x.copy()
    spoiled[1, GROUP + 3] = value
    ours, theirs = round_rows(teams[0], spoiled), round_rows(teams[0], x)
    for each in (ours, theirs):
        each.codes[1, GROUP : 2 * GROUP], each.scales[1, 1] = 0, 0.0
    assert same_rows(ours, theirs)


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight


@sizes
@settings(max_examples=40, deadline=None)
def test_norm(teams: list[Team], seed: int, count: int, groups: int) -> None:
    x, weight = random_rows(seed, count, groups * GROUP), random_rows(seed + 1, 1, groups * GROUP)[0]
    x[0] = 0.0
    both = []
    for team in teams:
        ours = room_for_rows(count, groups)
        run(team, [operations.norm(x, weight, EPS, ours.codes, ours.scales)], tokens=count)
        both.append(ours)
    check_rounded(both[0], rms_norm(x, weight))
    assert same_rows(*both)


def test_norm_of_the_tokens_that_are_given_logits(teams: list[Team]) -> None:
    x, weight = random_rows(0, 6, 64), random_rows(1, 1, 64)[0]
    ours, chosen = room_for_rows(6, 2), np.array([4, 0, 4], np.int64)
    norm = operations.norm(x, weight, EPS, ours.codes, ours.scales, of_logits=True)
    run(teams[0], [norm], tokens=6, LOGITS=3, LOGITS_INDEX=chosen)
    check_rounded(RoundedRows(ours.codes[:3], ours.scales[:3]), rms_norm(x[chosen], weight))
    assert (ours.codes[3:] == -99).all() and np.isnan(ours.scales[3:]).all()


@sizes
@settings(max_examples=40, deadline=None)
def test_add_norm(teams: list[Team], seed: int, count: int, groups: int) -> None:
    """From wider rows, as a program's are."""
    wide = random_rows(seed, count, (groups + 1) * GROUP)
    weight, before = random_rows(seed + 1, 1, groups * GROUP)[0], random_rows(seed + 2, count, groups * GROUP)
    outs = [before.copy() for _ in teams]
    for team, out in zip(teams, outs, strict=True):
        run(team, [operations.add_norm(wide, weight, EPS, out)], tokens=count)
    normed = rms_norm(wide[:, : groups * GROUP], weight)
    assert (np.abs(outs[0] - (before + normed)) <= FLOAT32 * (np.abs(before) + np.abs(normed))).all()
    assert same_bits(*outs)


ACTIVATIONS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: F.silu,
    GELU_TANH: functools.partial(F.gelu, approximate="tanh"),
}


@sizes
@pytest.mark.parametrize("kind", ACTIVATIONS)
@settings(max_examples=40, deadline=None)
def test_activate(teams: list[Team], kind: int, seed: int, count: int, groups: int) -> None:
    inner = groups * GROUP
    gate_up = random_rows(seed, count, 2 * inner + GROUP)
    ours = room_for_rows(count, groups)
    run(teams[1], [operations.activate(kind, gate_up, inner, ours.codes, ours.scales)], tokens=count)
    gate, up = torch.tensor(gate_up[:, :inner]).double(), torch.tensor(gate_up[:, inner : 2 * inner]).double()
    check_rounded(ours, (ACTIVATIONS[kind](gate) * up).numpy())


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activate_all_over_the_line(teams: list[Team], kind: int) -> None:
    """One gate in a group with zeros beside it, so that its own value has a scale of its own."""
    gates = np.concatenate([np.linspace(-12, 12, 481), [-88.0, -60.0, 60.0, 88.0, 1e4]])
    gate_up = np.zeros((len(gates), 2 * GROUP), np.float32)
    gate_up[:, 0], gate_up[:, GROUP] = gates, 1.0
    ours = room_for_rows(len(gates), 1)
    run(teams[0], [operations.activate(kind, gate_up, GROUP, ours.codes, ours.scales)], tokens=len(gates))
    exact = ACTIVATIONS[kind](torch.tensor(gate_up[:, 0]).double()).numpy()
    np.testing.assert_allclose(ours.values[:, 0], exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("gate", [-80.0, -90.0, -200.0, -1e4, -1e30])
def test_gates_that_are_shut(teams: list[Team], kind: int, gate: float) -> None:
    gate_up = np.full((1, 2 * GROUP), gate, np.float32)
    gate_up[:, GROUP:] = np.linspace(-0.3, 0.3, GROUP)
    ours = room_for_rows(1, 1)
    run(teams[0], [operations.activate(kind, gate_up, GROUP, ours.codes, ours.scales)], tokens=1)
    assert np.isfinite(ours.scales).all()
    assert np.abs(ours.values).max() < 1e-7


@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), halves=st.integers(1, 9), cap=st.sampled_from([1.0, 30.0]))
@settings(max_examples=40, deadline=None)
def test_soft_cap(teams: list[Team], seed: int, count: int, halves: int, cap: float) -> None:
    x = (np.random.default_rng(seed).standard_normal((count + 1, 16 * halves)) * 3 * cap).astype(np.float32)
    x[0, 0], x[0, 1] = 1e30, -1e30
    ours = x.copy()
    run(teams[1], [operations.soft_cap(ours, cap)], tokens=count + 1, LOGITS=count)
    np.testing.assert_allclose(ours[:count], cap * np.tanh(x[:count].astype(np.float64) / cap), atol=1e-6 * cap)
    assert same_bits(ours[count:], x[count:])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale", [1.0, 24.0, 0.37])
def test_embed(teams: list[Team], bits: int, scale: float) -> None:
    known = known_weights(np.random.default_rng(0), 45, 3, bits)
    weights, ids = packed_weights(known.values, bits), np.array([44, 0, 15, 16, 0, 31], np.int64)
    out = np.full((7, 4 * GROUP), np.nan, np.float32)
    run(teams[1], [operations.embed(weights, scale, out)], tokens=6, IDS=ids)
    assert same_bits(np.ascontiguousarray(out[:6, : 3 * GROUP]), known.values[ids] * np.float32(scale))
    assert np.isnan(out[6]).all() and np.isnan(out[:, 3 * GROUP :]).all()
