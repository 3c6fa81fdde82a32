"""Attention over the KV pool, as a program: against float64, and to the last bit against itself in other steps."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import operations
from kernels.cpu.team import Team
from tests.support.kernels import HALF, HALF_WIDTH, Chunk, Pools, as_kept, as_read, close_all, run_attention, same_bits

FLOAT32 = 2e-5  # of values around 1
WEIGHTS = 2.0**-8  # relative: with pairs of bfloat16, weights are rounded before and after they are summed
LAYERS, LAYER = 2, 1


@pytest.fixture(scope="module")
def teams() -> Iterator[list[Team]]:
    teams = [Team(threads) for threads in (1, 2, 3)]
    yield teams
    close_all(teams)


@dataclass
class Case:
    """`shape`: query heads, key-value heads, head_dim."""

    shape: tuple[int, int, int]
    kv_type: type
    window: int | None
    cap: float | None
    scale: float
    seed: int


def make_case(
    group: int, keys: int, parts: int, kv_type: type, window: int | None, cap: float | None, is_sharp: bool, seed: int
) -> Case:
    size = 16 * parts
    if kv_type is HALF:
        size = -(-size // HALF_WIDTH) * HALF_WIDTH
    return Case((group * keys, keys, size), kv_type, window, cap, 1.0 if is_sharp else size**-0.5, seed)


cases = st.builds(
    make_case, group=st.integers(1, 8), keys=st.integers(1, 3), parts=st.integers(1, 8),
    kv_type=st.sampled_from([HALF, np.float32]), window=st.sampled_from([None, None, 1, 5, 16, 17, 40]),
    cap=st.sampled_from([None, None, 3.0, 30.0]), is_sharp=st.booleans(), seed=st.integers(0, 2**32),
)  # fmt: skip
lengths = st.one_of(st.just(1), st.integers(1, 45))
chunks = st.lists(st.tuples(st.one_of(st.just(0), st.integers(0, 90)), lengths), min_size=1, max_size=5)


def attend(team: Team, case: Case, x: np.ndarray, parts: list[Chunk], kv: Pools) -> np.ndarray:
    """float32 [T, query heads, head_dim] of queries in `x`, float32 [T, columns]."""
    queries, _, size = case.shape
    out = np.full((len(x) + 1, queries * size + 16), np.nan, np.float32)
    row = operations.attend(
        x, case.shape, out, window=case.window, cap=case.cap, layer=LAYER, kv_bytes=kv.pools.itemsize
    )
    run_attention(team, [row], case.shape, parts, kv)
    assert np.isnan(out[-1]).all() and np.isnan(out[:, queries * size :]).all()
    return out[:-1, : queries * size].reshape(len(x), queries, size)


def check(ours: np.ndarray, case: Case, x: np.ndarray, parts: list[Chunk], kv: Pools) -> None:
    exact, magnitude = reference(case, x, parts, kv)
    bound = FLOAT32 + (WEIGHTS * magnitude if case.kv_type is np.uint16 else 0.0)
    assert (np.abs(ours - exact) <= bound).all()


def reference(case: Case, x: np.ndarray, parts: list[Chunk], kv: Pools) -> tuple[np.ndarray, np.ndarray]:
    """In float64, a token at a time; and the sum of the magnitudes of what is weighed.

    Pairs of bfloat16 are multiplied with queries that are rounded likewise.
    """
    queries, keys, size = case.shape
    x = as_read(as_kept(x, case.kv_type)) if case.kv_type is np.uint16 else x.astype(np.float64)
    x = x[:, : queries * size].reshape(len(x), keys, -1, size)
    places = [(part.row, position) for part in parts for position in part.positions]
    out, magnitude = np.empty((len(x), queries, size)), np.empty((len(x), queries, size))
    for token, (row, position) in enumerate(places):
        first = 0 if case.window is None else max(0, position - case.window + 1)
        key, value = as_read(kv.pools[LAYER, kv.table[row, first : position + 1]]).swapaxes(0, 1)
        scores = np.einsum("kgd,nkd->kgn", x[token], key)
        if case.cap:
            scores = case.cap * np.tanh(scores / case.cap)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[token] = np.einsum("kgn,nkd->kgd", weights, value).reshape(queries, size)
        magnitude[token] = np.einsum("kgn,nkd->kgd", weights, np.abs(value)).reshape(queries, size)
    return out, magnitude


def filled_pools(case: Case, generator: np.random.Generator, held: list[int]) -> Pools:
    """Keys and values of as many tokens of each row."""
    _, keys, size = case.shape
    kv = Pools.empty(
        generator, layers=LAYERS, rows=len(held), length=max(held) + 3, keys=keys, size=size, kv_type=case.kv_type
    )
    for row, length in enumerate(held):
        kv.pools[LAYER, kv.table[row, :length]] = as_kept(
            generator.standard_normal((length, 2, keys, size)).astype(np.float32), case.kv_type
        )
    return kv


@given(case=cases, sizes=chunks)
@settings(max_examples=120, deadline=None)
def test_mixed_steps(teams: list[Team], case: Case, sizes: list[tuple[int, int]]) -> None:
    """Single tokens and chunks, with and without something cached, in any order of rows."""
    generator = np.random.default_rng(case.seed)
    rows = generator.permutation(len(sizes))
    parts = [Chunk(int(row), cached, length) for row, (cached, length) in zip(rows, sizes, strict=True)]
    held = [0] * len(sizes)
    for part in parts:
        held[part.row] = part.cached + part.length
    kv = filled_pools(case, generator, held)
    queries, keys, size = case.shape
    shape = sum(part.length for part in parts), (queries + 2 * keys) * size
    x = (generator.standard_normal(shape) * case.scale).astype(np.float32)
    ours = attend(teams[0], case, x, parts, kv)
    check(ours, case, x, parts, kv)
    for team in teams[1:]:
        assert same_bits(attend(team, case, x, parts, kv), ours)


def in_steps(team: Team, case: Case, x: np.ndarray, has_rope: bool, steps: list[list[Chunk]]) -> np.ndarray:
    """Projections in `x`, float32 [row, position, columns], to attention's results, all of them by way of the pool."""
    queries, keys, size = case.shape
    kv = Pools.empty(
        np.random.default_rng(case.seed), layers=LAYERS, rows=x.shape[0], length=x.shape[1], keys=keys, size=size,
        kv_type=case.kv_type,
    )  # fmt: skip
    outs = np.full((*x.shape[:2], queries * size), np.nan, np.float32)
    frequencies = (100.0 ** -(np.arange(size // 2) / (size // 2))).astype(np.float32)
    for parts in steps:
        heads = np.concatenate([x[part.row, part.positions] for part in parts])
        out, rotation = np.empty((len(heads), queries * size), np.float32), np.empty((len(heads), size), np.float32)
        rotation = rotation.reshape(len(heads), 2, size // 2)
        rows = [operations.rotation(frequencies, 1.0, rotation)] if has_rope else []
        rows += [
            operations.heads(
                heads, case.shape, norm=None, rotation=rotation if has_rope else None, scale=case.scale, layer=LAYER,
                kv_bytes=kv.pools.itemsize,
            ),
            operations.attend(
                heads, case.shape, out, window=case.window, cap=case.cap, layer=LAYER, kv_bytes=kv.pools.itemsize
            ),
        ]  # fmt: skip
        run_attention(team, rows, case.shape, parts, kv, by_head=len(parts) % 2 == 0)
        start = 0
        for part in parts:
            outs[part.row, part.positions] = out[start : start + part.length]
            start += part.length
    return outs


def random_steps(generator: np.random.Generator, rows: int, length: int) -> list[list[Chunk]]:
    held, steps = [0] * rows, []
    while unfinished := [row for row in range(rows) if held[row] < length]:
        chosen = generator.permutation(unfinished)[: generator.integers(1, len(unfinished) + 1)]
        steps.append([])
        for row in chosen.tolist():
            count = min(length - held[row], int(generator.choice([1, 1, 2, 7, 16, 40])))
            steps[-1].append(Chunk(row, held[row], count))
            held[row] += count
    return steps


@given(case=cases, rows=st.integers(1, 3), length=st.integers(1, 70), has_rope=st.booleans())
@settings(max_examples=40, deadline=None)
def test_decode_is_prefill_to_the_last_bit(
    teams: list[Team], case: Case, rows: int, length: int, has_rope: bool
) -> None:
    """Whatever the chunks, the company, the number of threads, and whether heads are items of their own."""
    queries, keys, size = case.shape
    generator = np.random.default_rng(case.seed)
    x = generator.standard_normal((rows, length, (queries + 2 * keys) * size)).astype(np.float32)
    alone = [[Chunk(row, 0, length)] for row in range(rows)]
    together = [[Chunk(row, 0, length) for row in range(rows)]]
    decoded = [[Chunk(row, position, 1) for row in range(rows)] for position in range(length)]
    first = in_steps(teams[0], case, x, has_rope, alone)
    assert np.isfinite(first).all()
    for team, steps in ((teams[1], together), (teams[2], decoded), (teams[1], random_steps(generator, rows, length))):
        assert same_bits(in_steps(team, case, x, has_rope, steps), first)


@pytest.mark.parametrize("kv_type", [HALF, np.float32])
@pytest.mark.parametrize("window", [None, 100])
def test_long_contexts(teams: list[Team], kv_type: type, window: int | None) -> None:
    """Sums of thousands of weights, which begin anew with each largest score, and scores far apart."""
    case = Case((6, 2, 64), kv_type, window, None, 1.0, 0)
    generator = np.random.default_rng(0)
    kv = filled_pools(case, generator, [3000, 2990])
    grown = as_read(kv.pools[LAYER, kv.table[0, :3000], 0]) * np.linspace(0.1, 2, 3000)[:, None, None]
    kv.pools[LAYER, kv.table[0, :3000], 0] = as_kept(grown.astype(np.float32), kv_type)
    parts = [Chunk(0, 2999, 1), Chunk(1, 2980, 10)]
    x = generator.standard_normal((11, 10 * 64)).astype(np.float32)
    ours = [attend(team, case, x, parts, kv) for team in teams]
    check(ours[0], case, x, parts, kv)
    assert all(same_bits(each, ours[0]) for each in ours[1:])


def test_scores_that_exp_cannot_hold(teams: list[Team]) -> None:
    """The largest score takes all, above and below what exp of float32 reaches."""
    case = Case((1, 1, 16), np.float32, None, None, 1.0, 0)
    kv = filled_pools(case, np.random.default_rng(0), [40])
    kv.pools[LAYER, kv.table[0, :40], 0] = 0.0
    kv.pools[LAYER, kv.table[0, :40], 0, :, 0] = np.linspace(-200.0, 200.0, 40)[
        np.random.default_rng(1).permutation(40), None
    ]
    for sign in (1.0, -1.0):
        x = np.full((1, 48), sign, np.float32)
        ours = attend(teams[0], case, x, [Chunk(0, 39, 1)], kv)
        check(ours, case, x, [Chunk(0, 39, 1)], kv)
