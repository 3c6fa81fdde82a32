"""A mixture of experts: tokens are sorted by expert, and each expert multiplies its own.

Four launches whatever the router chose: sorting, gate and up with the activation, down, and the weighted sum. Nothing
is added by atomics, so a token's result depends on the other tokens of a step by their number only, which selects the
size of blocks and so the order in which a product's terms are added.

T tokens · E hidden size · I intermediate size · X experts · U experts that a token uses · P = T U pairs of both
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.activation import KINDS, activate, reference_gated
from kernels.compiling import Specialisation
from kernels.tuning import Config
from kernels.tuning import chosen as tuned

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_ROWS = (16, 64, 128)  # of a tile; so that an expert's mean share of the pairs nearly fills one


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    chosen, sorted_pairs, tile_expert, num_tiles, num_pairs,
    X: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_X: tl.constexpr,
):  # fmt: skip
    """A program for each expert: its pairs, in order, into tiles of its own; what is left of the last one is P."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK_X], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        inside = start + at < num_pairs
        experts = tl.load(chosen + start + at, mask=inside, other=0).to(tl.int32)
        counts += tl.histogram(experts, BLOCK_X, mask=inside)
    every = tl.arange(0, BLOCK_X)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(every < expert, tiles, 0), 0)
    own = tl.sum(tl.where(every == expert, tiles, 0), 0)
    if expert == X - 1:
        tl.store(num_tiles, first + own)
    if own == 0:
        return
    place = sorted_pairs + first * ROWS
    done = 0
    for start in range(0, num_pairs, BLOCK):
        inside = start + at < num_pairs
        ours = tl.load(chosen + start + at, mask=inside, other=-1) == expert
        rank = tl.cumsum(ours.to(tl.int32), 0)
        tl.store(place + done + rank - 1, start + at, mask=ours)
        done += tl.sum(ours.to(tl.int32), 0)
    rest = done + tl.arange(0, ROWS)
    tl.store(place + rest, tl.zeros([ROWS], tl.int32) + num_pairs, mask=rest < own * ROWS)
    for start in range(0, own, BLOCK):
        tl.store(tile_expert + first + start + at, tl.zeros([BLOCK], tl.int32) + expert, mask=start + at < own)


@triton.jit(do_not_specialize=["num_pairs", "most_tiles"])
def _product_kernel(
    x, weight, out, sorted_pairs, tile_expert, num_tiles, num_pairs, most_tiles, x_stride,
    N: tl.constexpr, SIZE: tl.constexpr, PAIRS_PER_ROW: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of `x Wᵀ`, or of activation(x Gᵀ) * (x Uᵀ) if there is a kind: out[pair] from x[pair // PAIRS_PER_ROW].

    Programs that follow each other share the rows of GROUP tiles and the columns of one block, which stay in L2.
    """
    in_group = GROUP * tl.cdiv(N, COLUMNS)
    group = tl.program_id(0) // in_group
    height = tl.minimum(most_tiles - group * GROUP, GROUP)
    within = tl.program_id(0) % in_group
    tile = group * GROUP + within % height
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tile_expert + tile).to(tl.int64)
    pairs = tl.load(sorted_pairs + tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = within // height * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    is_pair, is_column = pairs[:, None] < num_pairs, columns[None, :] < N
    rows = x + (pairs // PAIRS_PER_ROW)[:, None] * x_stride + inner[None, :]
    first = weight + expert * ((1 if KIND is None else 2) * N * SIZE) + columns[None, :] * SIZE + inner[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    second_total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SIZE, INNER):
        in_a, in_b = is_pair, is_column
        if SIZE % INNER:
            in_a = is_pair & (start + inner < SIZE)[None, :]
            in_b = is_column & (start + inner < SIZE)[:, None]
        a = tl.load(rows + start, mask=in_a, other=0.0)
        b = tl.load(first + start, mask=in_b, other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        if KIND is not None:
            b = tl.load(first + N * SIZE + start, mask=in_b, other=0.0)
            second_total = tl.dot(a, b, second_total, input_precision="ieee")
    if KIND is not None:
        total = activate(total, KIND) * second_total
    tl.store(out + pairs[:, None] * N + columns[None, :], total.to(out.dtype.element_ty), mask=is_pair & is_column)


@triton.jit
def _sum_kernel(parts, weights, out, out_stride, E: tl.constexpr, U: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = the sum of weights[t, u] * parts[t, u], in the order of u."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < E
    total = tl.zeros([BLOCK], tl.float32)
    for u in tl.static_range(U):
        part = tl.load(parts + (token * U + u) * E + at, mask=inside, other=0.0)
        total += tl.load(weights + token * U + u) * part.to(tl.float32)
    tl.store(out + token * out_stride + at, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What lies between the launches; one for all layers of a model, since each uses it up.

    Attributes:
        inner: [P, I], what `down` takes.
        parts: [P, E], what is summed.
        sorted_pairs: int32, pairs by expert, whole tiles.
        tile_expert: int32, the expert of each tile.
        num_tiles: int32 [1].
    """

    inner: torch.Tensor
    parts: torch.Tensor
    sorted_pairs: torch.Tensor
    tile_expert: torch.Tensor
    num_tiles: torch.Tensor

    @classmethod
    def allocate(
        cls, *, max_tokens: int, used: int, num_experts: int, hidden_size: int, intermediate_size: int,
        dtype: torch.dtype, device: torch.device | str,
    ) -> Workspace:  # fmt: skip
        """For steps of at most `max_tokens`: max_tokens * used * (hidden + intermediate size) values, and a little."""
        pairs = max_tokens * used
        busy = min(pairs, num_experts)
        return cls(
            inner=torch.empty(pairs, intermediate_size, dtype=dtype, device=device),
            parts=torch.empty(pairs, hidden_size, dtype=dtype, device=device),
            sorted_pairs=torch.empty(pairs + busy * (max(_ROWS) - 1), dtype=torch.int32, device=device),
            tile_expert=torch.empty(pairs // min(_ROWS) + busy, dtype=torch.int32, device=device),
            num_tiles=torch.empty(1, dtype=torch.int32, device=device),
        )


def experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *,
    kind: str, workspace: Workspace, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """out[t] = the sum over u of weights[t, u] * down(activation(gate(x[t])) * up(x[t])) of expert chosen[t, u].

    Each expert's part is rounded to x's dtype before the sum, which is taken in float32.

    Args:
        x: [T, E], rows contiguous; its dtype is that of the weights and the workspace.
        chosen: int64 [T, U], contiguous, in [0, X).
        weights: float32 [T, U], contiguous.
        gate_up: [X, 2I, E], contiguous: gate, then up.
        down: [X, E, I], contiguous.
        kind: one of `kernels.activation.KINDS`.
        out: [T, E] of any float dtype, rows contiguous.
    """
    assert kind in KINDS, kind
    assert all(each.is_contiguous() for each in (chosen, weights, gate_up, down)) and x.stride(1) == out.stride(1) == 1
    (num_tokens, used), (num_experts, hidden_size) = chosen.shape, down.shape[:2]
    pairs = num_tokens * used
    assert pairs <= len(workspace.inner), "the workspace is for fewer tokens"
    if not pairs:
        return out
    rows = _tile_rows(pairs, num_experts)
    _sort(chosen, workspace, num_experts, rows)
    _product(x, gate_up, workspace.inner, workspace, rows=rows, pairs=pairs, pairs_per_row=used, kind=kind)
    _product(workspace.inner, down, workspace.parts, workspace, rows=rows, pairs=pairs, pairs_per_row=1, kind=None)
    config = _sum_config(hidden_size)
    _sum_kernel[(num_tokens, triton.cdiv(hidden_size, config.blocks["BLOCK"]))](
        workspace.parts, weights, out, out.stride(0), hidden_size, used, **config.blocks,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _tile_rows(pairs: int, num_experts: int) -> int:
    mean = pairs // num_experts
    return next((rows for rows in _ROWS if mean <= rows), max(_ROWS))


def _most_tiles(pairs: int, num_experts: int, rows: int) -> int:
    """Each expert with a pair at all fills its last tile by one pair at least."""
    return (pairs + min(pairs, num_experts) * (rows - 1)) // rows


def _sort(chosen: torch.Tensor, workspace: Workspace, num_experts: int, rows: int) -> None:
    config = _sort_config(num_experts)
    _sort_kernel[(num_experts,)](
        chosen, workspace.sorted_pairs, workspace.tile_expert, workspace.num_tiles, chosen.numel(), num_experts, rows,
        **config.blocks, BLOCK_X=_bins(num_experts), num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _product(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, workspace: Workspace, *, rows: int, pairs: int,
    pairs_per_row: int, kind: str | None,
) -> None:  # fmt: skip
    shape = out.shape[1], weight.shape[2]
    config = _product_config(rows, shape, _TYPES[x.dtype], is_gated=kind is not None)
    most_tiles = _most_tiles(pairs, len(weight), rows)
    _product_kernel[(most_tiles * triton.cdiv(shape[0], config.blocks["COLUMNS"]),)](
        x, weight, out, workspace.sorted_pairs, workspace.tile_expert, workspace.num_tiles, pairs, most_tiles,
        x.stride(0), *shape, pairs_per_row, kind, rows, **config.blocks,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


def _bins(num_experts: int) -> int:
    return max(triton.next_power_of_2(num_experts), 32)


def _sort_config(num_experts: int) -> Config:
    return tuned("sort_pairs", f"{num_experts}", Config({"BLOCK": 1024}, 4, 1))


def _sum_config(hidden_size: int) -> Config:
    return tuned("sum_parts", f"{hidden_size}", Config({"BLOCK": min(1024, triton.next_power_of_2(hidden_size))}, 4, 1))


def _product_config(rows: int, shape: tuple[int, int], dtype: str, *, is_gated: bool) -> Config:
    """`shape`: columns of the result, and terms of a sum.

    With few rows, small blocks keep all multiprocessors reading weights; with many, large ones read them seldom.
    """
    key = f"{rows} x {shape[0]} x {shape[1]} {dtype}" + " gated" * is_gated
    columns, inner, warps, stages = {16: (32, 128, 4, 4), 64: (64, 64, 4, 4), 128: (64, 64, 8, 3)}[rows]
    if not is_gated:
        columns *= 2
    if dtype == "fp32":  # twice the shared memory, and no tensor cores: a thread holds more of both operands
        columns, inner = max(columns // 2, 16), inner // 2
    blocks = {"COLUMNS": columns, "INNER": inner, "GROUP": 8}
    return tuned("experts", key, Config(blocks, warps, stages))


def reference_experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, *,
    kind: str, out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(down)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        both = x[token].double() @ gate_up[expert].double().T
        inner = reference_gated(both, both.new_empty(len(token), down.shape[2]), kind=kind)
        total.index_add_(0, token, inner @ down[expert].double().T * weights[token, place, None])
    return out.copy_(total)


def serving() -> Iterator[Specialisation]:
    num_experts, used, hidden_size, intermediate_size = 128, 8, 2048, 768
    for each in (8, num_experts):
        yield _sort_specialisation(each)
    for dtype in ("bf16", "fp16", "fp32"):
        for rows in _ROWS:
            yield _product_specialisation(dtype, rows, (intermediate_size, hidden_size), used, "silu")
            yield _product_specialisation(dtype, rows, (hidden_size, intermediate_size), 1, None)
        yield _sum_specialisation(dtype, hidden_size, used)


def _sort_specialisation(num_experts: int) -> Specialisation:
    config = _sort_config(num_experts)
    signature = {
        "chosen": "*i64", "sorted_pairs": "*i32", "tile_expert": "*i32", "num_tiles": "*i32", "num_pairs": "i32",
    }  # fmt: skip
    constants = {"X": num_experts, "ROWS": 64, **config.blocks, "BLOCK_X": _bins(num_experts)}
    words = f"sort, {num_experts} experts"
    return Specialisation(words, _sort_kernel, signature, constants, config.num_warps, config.num_stages)


def _product_specialisation(
    dtype: str, rows: int, shape: tuple[int, int], pairs_per_row: int, kind: str | None
) -> Specialisation:
    config = _product_config(rows, shape, dtype, is_gated=kind is not None)
    signature = {
        "x": f"*{dtype}", "weight": f"*{dtype}", "out": f"*{dtype}", "sorted_pairs": "*i32", "tile_expert": "*i32",
        "num_tiles": "*i32", "num_pairs": "i32", "most_tiles": "i32", "x_stride": "i32",
    }  # fmt: skip
    constants = {
        "N": shape[0], "SIZE": shape[1], "PAIRS_PER_ROW": pairs_per_row, "KIND": kind, "ROWS": rows, **config.blocks,
    }  # fmt: skip
    words = f"{dtype}, {'gate and up' if kind else 'down'}, tiles of {rows}, {shape[1]} to {shape[0]}"
    return Specialisation(words, _product_kernel, signature, constants, config.num_warps, config.num_stages)


def _sum_specialisation(dtype: str, hidden_size: int, used: int) -> Specialisation:
    config = _sum_config(hidden_size)
    signature = {"parts": f"*{dtype}", "weights": "*fp32", "out": f"*{dtype}", "out_stride": "i32"}
    constants = {"E": hidden_size, "U": used, **config.blocks}
    words = f"{dtype}, sum of {used}, {hidden_size} wide"
    return Specialisation(words, _sum_kernel, signature, constants, config.num_warps, config.num_stages)
