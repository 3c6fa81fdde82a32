"""Programs of the CPU kernels, from arrays, and weights whose codes are known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from backend_lib.models.cpu_program import Buffers
from kernels.cpu import operations, program
from kernels.cpu.attention import PAIRS, plan_blocks
from kernels.cpu.matmul import GROUP, PANEL
from kernels.cpu.pack import pack, unpack
from kernels.cpu.team import Team

CODES = {4: (0, 15), 8: (1, 255)}  # the least and the largest that `pack` gives
# How numpy holds pools of 2 bytes a value: bfloat16, which it does not know, by its bits.
HALF = np.uint16 if PAIRS else np.float16
HALF_WIDTH = 32 if PAIRS else 16  # head_dim is a multiple


def run(team: Team, rows: list[list[int]], *, tokens: int, **words: int | np.ndarray) -> None:
    """Run a program. `words` are words of a step by their names in `kernels.cpu.program`, arrays by their address."""
    step = np.zeros(program.STEP_WORDS, np.int64)
    step[program.TOKENS] = tokens
    for name, value in words.items():
        step[getattr(program, name)] = value.ctypes.data if isinstance(value, np.ndarray) else value
    team.run(operations.table(rows), step)


@dataclass
class PackedWeights:
    """What `operations.linear` and `operations.embed` take."""

    packed: np.ndarray
    bias: np.ndarray
    bits: int
    groups: int
    panels: int
    error: float


def packed_weights(weight: np.ndarray, bits: int, bias: np.ndarray | None = None) -> PackedWeights:
    """From float32 [out, in] and float32 [out]."""
    panels = -(-len(weight) // PANEL)
    whole_bias = np.zeros(panels * PANEL, np.float32)
    if bias is not None:
        whole_bias[: len(bias)] = bias
    packed, error = pack(weight, bits)
    return PackedWeights(packed, whole_bias, bits, weight.shape[1] // GROUP, panels, error)


def unpacked(packed: np.ndarray, bits: int, outputs: int, groups: int) -> np.ndarray:
    """float32 [outputs, 32 groups]"""
    out = np.full((outputs, groups * GROUP), np.nan, np.float32)
    unpack(packed.ctypes.data, bits, groups, outputs, out.ctypes.data)
    return out


@dataclass
class KnownWeights:
    """A matrix on a grid: scale * code + low, all of it exact in float32, with the ends of the grid in each group.

    Attributes:
        codes: int64 [out, groups, 32].
        scale, low: float64 [out, groups], each a float16.
    """

    codes: np.ndarray
    scale: np.ndarray
    low: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """float32 [out, 32 groups]"""
        exact = self.scale[..., None] * self.codes + self.low[..., None]
        rounded = exact.astype(np.float32)
        assert (rounded == exact).all()
        return rounded.reshape(len(exact), -1)


def known_weights(
    generator: np.random.Generator, outputs: int, groups: int, bits: int, *, extreme: bool = False
) -> KnownWeights:
    """`extreme`: codes are at the ends of the grid only, where sums of products are largest."""
    least, most = CODES[bits]
    shape = outputs, groups, GROUP
    codes = generator.choice([least, most], shape) if extreme else generator.integers(least, most + 1, shape)
    ends = generator.permuted(np.broadcast_to(np.arange(GROUP), shape), axis=-1)[..., :2]
    np.put_along_axis(codes, ends, np.broadcast_to([least, most], ends.shape), axis=-1)
    scale = generator.integers(1024, 2048, shape[:2]) * 2.0**-16  # [1/64, 1/32)
    low = -128 * scale if bits == 8 else generator.integers(-1024, 1024, shape[:2]) * 2.0**-10
    return KnownWeights(codes.astype(np.int64), scale, low)


@dataclass
class RoundedRows:
    """What kernels make of float32 rows: int8 [rows, 32 groups], and float32 [rows, groups, 2]."""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def values(self) -> np.ndarray:
        """What the codes stand for, float64 [rows, 32 groups]."""
        by_group = self.codes.reshape(*self.scales.shape[:2], GROUP).astype(np.float64)
        return (by_group * self.scales[..., :1]).reshape(self.codes.shape)


def room_for_rows(rows: int, groups: int) -> RoundedRows:
    """Filled with what no kernel leaves there by chance."""
    return RoundedRows(np.full((rows, groups * GROUP), -99, np.int8), np.full((rows, groups, 2), np.nan, np.float32))


def round_rows(team: Team, x: np.ndarray) -> RoundedRows:
    out = room_for_rows(len(x), x.shape[1] // GROUP)
    run(team, [operations.quantise(x, x.shape[1] // GROUP, out.codes, out.scales)], tokens=len(x))
    return out


def product(team: Team, x: np.ndarray, weights: PackedWeights, adds_to: np.ndarray | None = None) -> np.ndarray:
    """float32 [rows, columns of all panels]: x Wᵀ + bias, added to a copy of `adds_to` if there is one."""
    rounded = room_for_rows(len(x), weights.groups)
    shape = len(x), weights.panels * PANEL
    out = np.full(shape, np.nan, np.float32) if adds_to is None else adds_to.copy()
    rows = [
        operations.quantise(x, weights.groups, rounded.codes, rounded.scales),
        operations.linear(weights, rounded.codes, rounded.scales, out, adds=adds_to is not None),
    ]
    run(team, rows, tokens=len(x))
    return out


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


def close_all(teams: Iterable[Team]) -> None:
    for team in teams:
        team.close()


def as_kept(values: np.ndarray, kv_type: type) -> np.ndarray:
    """As a pool holds float32 values, rounded to the nearest."""
    if kv_type is np.uint16:
        return torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.uint16).numpy()
    with np.errstate(over="ignore"):
        return values.astype(kv_type)


def as_read(pool: np.ndarray) -> np.ndarray:
    """float64 of what a pool holds."""
    return ((pool.astype(np.uint32) << 16).view(np.float32) if pool.dtype == np.uint16 else pool).astype(np.float64)


@dataclass
class Chunk:
    """Tokens of one sequence that a step computes: `length` after the `cached` first, by `row` of the KV table."""

    row: int
    cached: int
    length: int

    @property
    def positions(self) -> np.ndarray:
        return np.arange(self.cached, self.cached + self.length)


@dataclass
class Pools:
    """KV pools of all layers, [layer, token, key or value, K, D], and the table that says which token is where.

    Tokens are spread at random; what belongs to none of them is NaN, and so is the last place, which all of the table
    names that is not used.
    """

    pools: np.ndarray
    table: np.ndarray

    @classmethod
    def empty(
        cls, generator: np.random.Generator, *, layers: int, rows: int, length: int, keys: int, size: int, kv_type: type
    ) -> Pools:
        places = rows * length
        table = generator.permutation(places).reshape(rows, length).astype(np.int32)
        padded = np.full((rows, length + 7), places, np.int32)
        padded[:, :length] = table
        return cls(as_kept(np.full((layers, places + 1, 2, keys, size), np.nan, np.float32), kv_type), padded)

    def places(self, chunks: list[Chunk]) -> np.ndarray:
        """int64 [T]"""
        return np.concatenate([self.table[chunk.row, chunk.positions] for chunk in chunks]).astype(np.int64)


def run_attention(
    team: Team, rows: list[list[int]], shape: tuple[int, int, int], chunks: list[Chunk], kv: Pools, *,
    by_head: bool = False,
) -> None:  # fmt: skip
    """Run a program of heads and attention. `shape`: query heads, key-value heads, head_dim.

    `by_head`: each key-value head of a block is an item of its own.
    """
    tokens = sum(chunk.length for chunk in chunks)
    config = SimpleNamespace(
        num_heads=shape[0], num_kv_heads=shape[1], head_dim=shape[2], hidden_size=GROUP, intermediate_size=GROUP,
        vocab_size=1,
    )  # fmt: skip
    buffers = Buffers(config, tokens, team.threads)  # type: ignore[arg-type]
    described = np.array([[each.row, each.length, each.cached + each.length] for each in chunks], np.int64).T.copy()
    run(
        team, rows, tokens=tokens, POSITIONS=np.concatenate([chunk.positions for chunk in chunks]).astype(np.int64),
        KV_INDEX=kv.places(chunks), KV_TABLE=kv.table, KV_TABLE_STRIDE=kv.table.strides[0], POOLS=kv.pools,
        POOL_BYTES=kv.pools.strides[0], BLOCKS=buffers.blocks,
        NUM_BLOCKS=plan_blocks(described, buffers.queries, buffers.blocks), SCRATCH=buffers.scratch,
        SCRATCH_BYTES=buffers.scratch.strides[0], HEAD_PARTS=shape[1] if by_head else 1,
    )  # fmt: skip
