"""Products of rounded rows with codes, against sums of integers."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import operations
from kernels.cpu.matmul import GROUP, PANEL
from kernels.cpu.team import Team
from tests.support.kernels import (
    CODES,
    KnownWeights,
    RoundedRows,
    close_all,
    known_weights,
    packed_weights,
    product,
    round_rows,
    run,
    same_bits,
)

FLOAT32 = 1e-5  # of the sum of the magnitudes: some 20 groups are added one after the other


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    teams = [Team(threads) for threads in (1, 2, 3)]
    yield teams
    close_all(teams)


def integer_product(x: RoundedRows, weights: KnownWeights) -> tuple[np.ndarray, np.ndarray]:
    """float64 [rows, out], and the sum of the magnitudes of what is added. What a group adds up is exact."""
    codes = x.codes.reshape(*x.scales.shape[:2], GROUP).astype(np.int64)
    dots = np.einsum("rgi,ogi->rog", codes, weights.codes)
    scale = x.scales[:, None, :, 0].astype(np.float64)
    parts = [scale * dots * weights.scale, scale * codes.sum(-1)[:, None] * weights.low]
    return sum(part.sum(-1) for part in parts), sum(np.abs(part).sum(-1) for part in parts)


def rows(generator: np.random.Generator, count: int, groups: int, *, extreme: bool) -> np.ndarray:
    """Magnitudes differ by group. `extreme`: all codes are ±127, by long runs of one sign."""
    shape = count, groups, GROUP
    values = generator.choice([-1.0, 1.0], (count, groups, 1)) if extreme else generator.standard_normal(shape)
    magnitude = 10.0 ** generator.uniform(-3, 3, (count, groups, 1))
    return np.ascontiguousarray(np.broadcast_to(values * magnitude, shape).reshape(count, -1), np.float32)


sizes = given(
    seed=st.integers(0, 2**32), count=st.integers(1, 40), groups=st.integers(1, 20), outputs=st.integers(1, 100),
    bits=st.sampled_from([4, 8]), extreme=st.booleans(), has_bias=st.booleans(), adds=st.booleans(),
)  # fmt: skip


@sizes
@settings(max_examples=100, deadline=None)
def test_sums_are_exact(
    teams: list[Team], seed: int, count: int, groups: int, outputs: int, bits: int, extreme: bool, has_bias: bool,
    adds: bool,
) -> None:  # fmt: skip
    generator = np.random.default_rng(seed)
    known = known_weights(generator, outputs, groups, bits, extreme=extreme)
    bias = generator.standard_normal(outputs).astype(np.float32) if has_bias else None
    weights = packed_weights(known.values, bits, bias)
    x = rows(generator, count, groups, extreme=extreme)
    before = generator.standard_normal((count, weights.panels * PANEL)).astype(np.float32) if adds else None
    exact, magnitude = integer_product(round_rows(teams[0], x), known)
    for addend in (bias, None if before is None else before[:, :outputs]):
        if addend is not None:
            exact, magnitude = exact + addend, magnitude + np.abs(addend)
    ours = [product(team, x, weights, before) for team in teams]
    assert (np.abs(ours[0][:, :outputs] - exact) <= FLOAT32 * magnitude).all()
    assert all(same_bits(each, ours[0]) for each in ours[1:])
    assert not np.isnan(ours[0]).any()


@sizes
@settings(max_examples=40, deadline=None)
def test_a_row_is_the_same_whatever_else_is_computed(
    teams: list[Team], seed: int, count: int, groups: int, outputs: int, bits: int, extreme: bool, has_bias: bool,
    adds: bool,
) -> None:  # fmt: skip
    generator = np.random.default_rng(seed)
    weights = packed_weights(known_weights(generator, outputs, groups, bits).values, bits)
    x = rows(generator, count, groups, extreme=extreme)
    together = product(teams[1], x, weights)
    for row in {0, count // 2, count - 1}:
        assert same_bits(product(teams[0], x[row : row + 1], weights), together[row : row + 1])
    start = int(generator.integers(count))
    order = generator.permutation(count)[start:]
    assert same_bits(product(teams[2], x[order], weights), together[order])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_sums(teams: list[Team], bits: int, sign: int) -> None:
    """All codes are as large as they get: what is kept in 16 bits on the way must not overflow."""
    known = known_weights(np.random.default_rng(0), 16, 4, bits)
    known.codes[:] = CODES[bits][1]
    known.codes[..., 0] = CODES[bits][0]  # the other end of the grid, so that packing finds the same
    x = np.full((9, 4 * GROUP), sign, np.float32)
    exact, magnitude = integer_product(round_rows(teams[0], x), known)
    ours = product(teams[0], x, packed_weights(known.values, bits))
    assert (np.abs(ours - exact) <= FLOAT32 * magnitude).all()


def test_only_rows_that_are_given_logits(teams: list[Team]) -> None:
    generator = np.random.default_rng(0)
    weights = packed_weights(known_weights(generator, 30, 2, 4).values, 4)
    rounded = round_rows(teams[0], rows(generator, 5, 2, extreme=False))
    out = np.full((5, 32), np.nan, np.float32)
    head = operations.linear(weights, rounded.codes, rounded.scales, out, of_logits=True)
    run(teams[1], [head], tokens=5, LOGITS=3)
    whole = np.full((5, 32), np.nan, np.float32)
    run(teams[1], [operations.linear(weights, rounded.codes, rounded.scales, whole)], tokens=5)
    assert same_bits(out[:3], whole[:3])
    assert np.isnan(out[3:]).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_nothing_is_written_beyond_its_columns_and_rows(teams: list[Team], bits: int) -> None:
    generator = np.random.default_rng(0)
    weights = packed_weights(known_weights(generator, 20, 3, bits).values, bits)
    rounded = round_rows(teams[0], rows(generator, 7, 3, extreme=False))
    out = np.full((10, 50), -7.0, np.float32)
    run(teams[2], [operations.linear(weights, rounded.codes, rounded.scales, out)], tokens=7)
    assert not (out[:7, :32] == -7.0).any()
    assert (out[7:] == -7.0).all() and (out[:, 32:] == -7.0).all()


def test_a_step_without_tokens(teams: list[Team]) -> None:
    weights = packed_weights(known_weights(np.random.default_rng(0), 20, 3, 4).values, 4)
    for team in teams:
        assert product(team, np.empty((0, 96), np.float32), weights).shape == (0, 32)
