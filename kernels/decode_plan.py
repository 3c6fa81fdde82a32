"""Where a step's rows are cut for decoding, decided on the device.

`plan_decode` cuts what the rows look at into items of about the same length: a long row is shared by many programs, a
short one is one item, and the longest items start first. It runs once a step for all layers with the same window. The
grid that it fills depends on the number of rows alone, so a captured graph fits any lengths.

n rows · H query heads · K key-value heads · D head_dim · T programs aimed at per key-value head · I = T + n items at
most
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import triton
import triton.language as tl

from kernels.compiling import Specialisation
from kernels.tuning import Config, chosen


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["positions"])
def plan_kernel(
    positions, num_rows, items, row_items, num_items,
    WINDOW: tl.constexpr, TARGET: tl.constexpr, BLOCK_N: tl.constexpr, MAX_ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One program a row. Each looks at all lengths, so none needs another's result."""
    row = tl.program_id(0)
    rows = tl.arange(0, MAX_ROWS)
    kv_lens = tl.load(positions + rows, mask=rows < num_rows, other=-1).to(tl.int32) + 1
    lengths = tl.minimum(kv_lens, WINDOW) if WINDOW is not None else kv_lens
    # Each row is less than one item longer, in items, than its share: sum(ceil(length / size)) < total / size + n. And
    # total / size is at most TARGET. So there are at most TARGET + n items, which is the grid.
    size = tl.cdiv(tl.cdiv(tl.sum(lengths, 0), TARGET), BLOCK_N) * BLOCK_N
    counts = tl.cdiv(lengths, size)
    # A row's items are equally long, in whole blocks. None is empty: `step` is at most `size`, and
    # (counts - 1) × size < length.
    steps = tl.cdiv(tl.cdiv(lengths, tl.maximum(counts, 1)), BLOCK_N) * BLOCK_N

    is_mine = rows == row
    step = tl.sum(tl.where(is_mine, steps, 0), 0)
    count = tl.sum(tl.where(is_mine, counts, 0), 0)
    end = tl.sum(tl.where(is_mine, kv_lens, 0), 0)
    start = end - tl.sum(tl.where(is_mine, lengths, 0), 0)
    # The longest first, or the step would end with one of them.
    is_before = (steps > step) | ((steps == step) & (rows < row))
    first_item = tl.sum(tl.where(is_before, counts, 0), 0)
    tl.store(row_items + 2 * row, first_item)
    tl.store(row_items + 2 * row + 1, first_item + count)
    if row == 0:
        tl.store(num_items, tl.sum(counts, 0))
    for number in range(0, count, WIDTH):
        numbers = number + tl.arange(0, WIDTH)
        begins = start + numbers * step
        record = items + 4 * (first_item + numbers)
        is_item = numbers < count
        tl.store(record, row, mask=is_item)
        tl.store(record + 1, begins, mask=is_item)
        tl.store(record + 2, tl.minimum(begins + step, end), mask=is_item)


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Where a step's rows are cut, and room for what the items give. One for each window, made once.

    Attributes:
        items: int32 [I, 4], row, first position, position after the last, nothing. The longest come first.
        row_items: int32 [max_rows, 2], a row's first item and the one after its last.
        num_items: int32 [1].
        partial: float32 [I, H, D], attention over the item's tokens alone.
        log_sums: float32 [I, H], log2 of the sum of its tokens' exponentials.
        window: how many tokens a query looks at, itself included; None is all.
        target: T, items of a step with enough tokens.
        config: of the kernel that attends.
    """

    items: torch.Tensor
    row_items: torch.Tensor
    num_items: torch.Tensor
    partial: torch.Tensor
    log_sums: torch.Tensor
    window: int | None
    target: int
    config: Config

    @classmethod
    def allocate(
        cls, max_rows: int, shape: tuple[int, int, int], *, dtype: torch.dtype, device: torch.device | str,
        window: int | None = None, multiprocessors: int | None = None, config: Config | None = None,
    ) -> DecodePlan:  # fmt: skip
        """Device memory for about (T + max_rows) × H × (D + 1) floats.

        Args:
            shape: query heads, key-value heads, head_dim.
            dtype: of query and pool.
            multiprocessors: the device's number if None.
        """
        heads, kv_heads, head_dim = shape
        config = config or chosen("decode_attention", f"{head_dim} {dtype}", default_config(head_dim, dtype))
        if multiprocessors is None:
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        target = max(1, multiprocessors * config.blocks["programs"] // kv_heads)
        most_items = target + max_rows

        def ints(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        return cls(
            items=ints(most_items, 4), row_items=ints(max_rows, 2), num_items=ints(1),
            partial=torch.empty(most_items, heads, head_dim, device=device),
            log_sums=torch.empty(most_items, heads, device=device),
            window=window, target=target, config=config,
        )  # fmt: skip


def default_config(head_dim: int, dtype: torch.dtype) -> Config:
    """Blocks: `N` tokens at once; `programs` of a multiprocessor, as many as its shared memory holds, about."""
    if dtype == torch.float32:
        return Config({"N": 16, "programs": 2}, num_warps=4, num_stages=3)
    if head_dim <= 64:
        return Config({"N": 32, "programs": 6}, num_warps=4, num_stages=4)
    return Config({"N": 32, "programs": 4 if head_dim <= 128 else 3}, num_warps=4, num_stages=3)


def candidates(head_dim: int) -> list[Config]:
    """What a tuner may try. Two programs or six of a multiprocessor, of 2 or 4 warps, with 16 to 128 KiB under way."""
    return [
        Config({"N": block, "programs": programs}, warps, stages)
        for block, programs, warps, stages in product((16, 32, 64, 128), (2, 3, 4, 6), (2, 4), (2, 3, 4))
        if 16 <= programs * (stages - 1) * block * head_dim * 4 / 1024 <= 160
    ]


def plan_decode(positions: torch.Tensor, plan: DecodePlan, *, window: int | None) -> None:
    """Cut the rows into the plan's items.

    Args:
        positions: int64 [n], n at most the plan's max_rows, of the tokens to decode: a row looks at position + 1
            tokens, or the last `window` of them. Together they are less than 2^31.
    """
    assert window == plan.window and 0 < len(positions) <= len(plan.row_items)
    plan_kernel[(len(positions),)](
        positions, len(positions), plan.items, plan.row_items, plan.num_items,
        **_constants(plan.window, plan.target, plan.config.blocks["N"], len(plan.row_items)),
    )  # fmt: skip


def _constants(window: int | None, target: int, block: int, max_rows: int) -> dict[str, int | None]:
    return {
        "WINDOW": window,
        "TARGET": target,
        "BLOCK_N": block,
        "MAX_ROWS": triton.next_power_of_2(max_rows),
        "WIDTH": 128,
    }


def serving() -> Iterator[Specialisation]:
    ints = dict.fromkeys(("items", "row_items", "num_items"), "*i32")
    for max_rows, window in ((256, None), (1024, 4096)):
        constants = _constants(window, 66, 32, max_rows)
        signature = {"positions": "*i64", "num_rows": "i32", **ints}
        yield Specialisation(f"{max_rows} rows, window {window}", plan_kernel, signature, constants)
