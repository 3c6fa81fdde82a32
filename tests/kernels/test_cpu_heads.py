"""Heads of a fused projection on their way to attention: norms, rotation, scale, and the KV pool."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import operations
from kernels.cpu.team import Team
from tests.support.kernels import HALF, HALF_WIDTH, as_kept, close_all, run, same_bits

EPS = 1e-6
KV_TYPES = {2: HALF, 4: np.float32}
LAYERS, LAYER = 3, 1


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    teams = [Team(threads) for threads in (1, 3)]
    yield teams
    close_all(teams)


@functools.cache  # a program does not keep its arrays alive
def frequencies(half: int) -> np.ndarray:
    return (100.0 ** -(np.arange(half) / half)).astype(np.float32)


def angles(positions: np.ndarray, half: int) -> np.ndarray:
    """float64 [T, half] of what float32 makes of them: far along, its rounding is more than the test's tolerance."""
    return (positions[:, None].astype(np.float32) * frequencies(half)).astype(np.float64)


@pytest.mark.parametrize("magnitude", [1.0, 1.19])
@pytest.mark.parametrize("half", [1, 7, 8, 32])
def test_rotation(teams: list[Team], half: int, magnitude: float) -> None:
    positions = np.array([0, 1, 5, 8191, 131071, 3], np.int64)
    out = np.full((7, 2, half), np.nan, np.float32)
    run(teams[1], [operations.rotation(frequencies(half), magnitude, out)], tokens=6, POSITIONS=positions)
    exact = angles(positions, half)
    np.testing.assert_allclose(out[:6, 0], np.cos(exact) * magnitude, atol=1e-6)
    np.testing.assert_allclose(out[:6, 1], np.sin(exact) * magnitude, atol=1e-6)
    assert np.isnan(out[6]).all()


@dataclass
class Heads:
    """Inputs: x float32 [T, columns], of which the heads are the first; positions and places in the pool."""

    x: np.ndarray
    shape: tuple[int, int, int]
    positions: np.ndarray
    kv_index: np.ndarray
    norm: np.ndarray | None
    half: int
    scale: float
    pool: np.ndarray


def prepare(team: Team, heads: Heads) -> tuple[np.ndarray, np.ndarray]:
    """What becomes of x and of the pool."""
    x, pool = heads.x.copy(), heads.pool.copy()
    tokens, rotation = len(x), np.full((len(x), 2, max(heads.half, 1)), np.nan, np.float32)
    rows = [operations.rotation(frequencies(heads.half), 1.0, rotation)] if heads.half else []
    rows += [
        operations.heads(
            x, heads.shape, norm=None if heads.norm is None else (heads.norm, EPS), layer=LAYER, scale=heads.scale,
            rotation=rotation if heads.half else None, kv_bytes=pool.itemsize,
        )
    ]  # fmt: skip
    run(
        team, rows, tokens=tokens, POSITIONS=heads.positions, KV_INDEX=heads.kv_index, POOLS=pool,
        POOL_BYTES=pool.strides[0],
    )  # fmt: skip
    return x, pool


def reference(heads: Heads) -> np.ndarray:
    """float64 [T, heads, head_dim]: queries, keys and values."""
    queries, keys, size = heads.shape
    out = heads.x[:, : (queries + 2 * keys) * size].astype(np.float64).reshape(len(heads.x), -1, size)
    rotated = out[:, : queries + keys]
    if heads.norm is not None:
        rotated /= np.sqrt((rotated**2).mean(-1, keepdims=True) + EPS)
        rotated *= heads.norm
    if half := heads.half:
        cosine, sine = (each(angles(heads.positions, half))[:, None] for each in (np.cos, np.sin))
        left, right = rotated[..., :half].copy(), rotated[..., half : 2 * half].copy()
        rotated[..., :half], rotated[..., half : 2 * half] = left * cosine - right * sine, right * cosine + left * sine
    out[:, :queries] *= heads.scale
    return out


@given(
    seed=st.integers(0, 2**32), tokens=st.integers(1, 9), group=st.integers(1, 5), keys=st.integers(1, 3),
    parts=st.integers(1, 8), has_norm=st.booleans(), rotated=st.sampled_from([0.0, 0.25, 0.7, 1.0]),
    scale=st.sampled_from([1.0, 0.125, 0.37]), kv_bytes=st.sampled_from([2, 4]),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_heads(
    teams: list[Team], seed: int, tokens: int, group: int, keys: int, parts: int, has_norm: bool, rotated: float,
    scale: float, kv_bytes: int,
) -> None:  # fmt: skip
    generator = np.random.default_rng(seed)
    size = -(-16 * parts // HALF_WIDTH) * HALF_WIDTH if kv_bytes == 2 else 16 * parts
    shape = queries, _, size = group * keys, keys, size
    wide, free = (queries + 2 * keys) * size, tokens + 5
    heads = Heads(
        x=generator.standard_normal((tokens, wide + 32)).astype(np.float32), shape=shape,
        positions=generator.integers(0, 5000, tokens), kv_index=generator.permutation(free)[:tokens],
        norm=generator.uniform(0.5, 2.0, (queries + keys, size)).astype(np.float32) if has_norm else None,
        half=int(rotated * size / 2), scale=scale,
        pool=as_kept(
            generator.standard_normal((LAYERS, free, 2, keys, size)).astype(np.float32), KV_TYPES[kv_bytes]
        ),
    )  # fmt: skip
    x, pool = prepare(teams[0], heads)
    exact = reference(heads)
    np.testing.assert_allclose(x[:, :wide].reshape(exact.shape), exact, rtol=1e-5, atol=2e-6)
    assert same_bits(np.ascontiguousarray(x[:, wide:]), np.ascontiguousarray(heads.x[:, wide:]))
    check_pool(heads, x, pool)
    assert all(same_bits(*each) for each in zip(prepare(teams[1], heads), (x, pool), strict=True))


def check_pool(heads: Heads, x: np.ndarray, pool: np.ndarray) -> None:
    """The step's keys and values are in their places, in the pool's type; all else is as it was."""
    queries, keys, size = heads.shape
    expected = heads.pool.copy()
    key_values = x[:, queries * size : (queries + 2 * keys) * size].reshape(len(x), 2, keys, size)
    expected[LAYER, heads.kv_index] = as_kept(key_values, pool.dtype.type)
    assert same_bits(pool, expected)


def test_two_bytes_keep_what_they_can(teams: list[Team]) -> None:
    """Rounded to the nearest, to even where two are as near; also next to zero, and beyond the range of float16."""
    values = [
        65504.0,
        -65504.0,
        1e-7,
        6e-8,
        2e-8,
        1e5,
        *(1.0 + k * 2.0**-n for n in (8, 9, 11, 12) for k in (1, 3)),
        0,
        -1,
    ]
    heads = Heads(
        x=np.tile(np.array(values, np.float32), 6)[None], shape=(1, 1, 32), positions=np.array([0]),
        kv_index=np.array([1]), norm=None, half=0, scale=1.0, pool=np.zeros((LAYERS, 2, 2, 1, 32), HALF),
    )  # fmt: skip
    _, pool = prepare(teams[0], heads)
    assert same_bits(pool[LAYER, 1, :, 0], as_kept(heads.x[0, 32:].reshape(2, 32), HALF))
