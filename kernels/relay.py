"""What a step reads and leaves in the relay table: the token that each row has sampled last, which no CPU has seen yet.

T tokens in the step · n decode rows · R rows, one more is the spare · P positions of a row · L rows of logits
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.compiling import Specialisation

BLOCK = 128


@triton.jit(do_not_specialize=["num_decodes", "padding", "num_tokens", "spare_row", "spare_index"],
            do_not_specialize_on_alignment=["token_rows", "positions", "kv_index", "prompt_ids"])  # fmt: skip
def _stage_kernel(
    token_rows, positions, kv_index, prompt_ids, relay, kv_table, out_ids, out_rows, out_positions, out_kv_index,
    num_decodes, padding, num_tokens, spare_row, spare_index, table_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place i of the outputs is decode row i, padding, or the token that comes `padding` places before."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_decode = place < num_decodes
    is_prompt = (place >= num_decodes + padding) & (place < num_tokens + padding)
    token = tl.where(is_decode, place, place - padding)
    is_token = is_decode | is_prompt
    row = tl.load(token_rows + token, mask=is_token, other=0)
    position = tl.load(positions + token, mask=is_token, other=0)
    index = tl.load(kv_index + token, mask=is_token, other=0)
    newest = tl.load(relay + row, mask=is_decode, other=0)
    given = tl.load(prompt_ids + (token - num_decodes), mask=is_prompt, other=0)
    inside = place < num_tokens + padding
    tl.store(out_ids + place, tl.where(is_decode, newest, given), mask=inside)
    tl.store(out_rows + place, tl.where(is_token, row, spare_row), mask=inside)
    tl.store(out_positions + place, position, mask=inside)
    tl.store(out_kv_index + place, tl.where(is_token, index, spare_index), mask=inside)
    tl.store(kv_table + row * table_stride + position, index.to(tl.int32), mask=is_token)


def stage_inputs(
    token_rows: torch.Tensor, positions: torch.Tensor, kv_index: torch.Tensor, prompt_ids: torch.Tensor,
    relay: torch.Tensor, kv_table: torch.Tensor, input_ids: torch.Tensor, out_rows: torch.Tensor,
    out_positions: torch.Tensor, out_kv_index: torch.Tensor, *, num_decodes: int, padded: int, spare_row: int,
    spare_index: int,
) -> None:  # fmt: skip
    """Write a step's inputs where a graph reads them, and its indices into the KV table.

    Decode rows come first, with the tokens that they have sampled last; they are filled up to `padded` with the spare
    row at position 0; the tokens of prompts follow.

    Args:
        token_rows, positions, kv_index: int64 [T], contiguous, decode rows first.
        prompt_ids: int64 [T - n].
        relay: int64 [R + 1]. An id below 0 is passed on: the row has sampled nothing, and the embedding is to fail.
        kv_table: int32 [R + 1, P], rows contiguous; `kv_table[row, position]` becomes `kv_index` for the T.
        input_ids, out_rows, out_positions, out_kv_index: int64 [padded + T - n].
    """
    num_tokens, padding = len(token_rows), padded - num_decodes
    assert len(prompt_ids) == num_tokens - num_decodes and len(input_ids) == num_tokens + padding and padding >= 0
    _stage_kernel[(triton.cdiv(num_tokens + padding, BLOCK),)](
        token_rows, positions, kv_index, prompt_ids, relay, kv_table, input_ids, out_rows, out_positions, out_kv_index,
        num_decodes, padding, num_tokens, spare_row, spare_index, kv_table.stride(0), BLOCK,
    )  # fmt: skip


def reference_stage_inputs(
    token_rows: torch.Tensor, positions: torch.Tensor, kv_index: torch.Tensor, prompt_ids: torch.Tensor,
    relay: torch.Tensor, kv_table: torch.Tensor, input_ids: torch.Tensor, out_rows: torch.Tensor,
    out_positions: torch.Tensor, out_kv_index: torch.Tensor, *, num_decodes: int, padded: int, spare_row: int,
    spare_index: int,
) -> None:  # fmt: skip
    def filled(values: torch.Tensor, filling: int) -> torch.Tensor:
        padding = values.new_full((padded - num_decodes,), filling)
        return torch.cat([values[:num_decodes], padding, values[num_decodes:]])

    kv_table[token_rows, positions] = kv_index.int()
    input_ids.copy_(filled(torch.cat([relay[token_rows[:num_decodes]], prompt_ids]), 0))
    out_rows.copy_(filled(token_rows, spare_row))
    out_positions.copy_(filled(positions, 0))
    out_kv_index.copy_(filled(kv_index, spare_index))


@triton.jit(do_not_specialize=["count", "rows_stride"], do_not_specialize_on_alignment=["token_ids", "rows"])
def _scatter_kernel(token_ids, rows, relay, count, rows_stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at * rows_stride, mask=inside, other=0)
    tl.store(relay + row, tl.load(token_ids + at, mask=inside), mask=inside)


def scatter_ids(token_ids: torch.Tensor, rows: torch.Tensor, relay: torch.Tensor) -> None:
    """relay[rows] = token_ids.

    Args:
        token_ids: int64 [L], contiguous.
        rows: int64 [L], with any stride; they differ, but for the spare one, which keeps one of its tokens.
        relay: int64 [R + 1].
    """
    assert token_ids.is_contiguous()
    if len(rows):
        grid = (triton.cdiv(len(rows), BLOCK),)
        _scatter_kernel[grid](token_ids, rows, relay, len(rows), rows.stride(0), BLOCK)


def reference_scatter_ids(token_ids: torch.Tensor, rows: torch.Tensor, relay: torch.Tensor) -> None:
    relay[rows] = token_ids


def serving() -> Iterator[Specialisation]:
    arrays = ("token_rows", "positions", "kv_index", "prompt_ids", "relay", "out_ids", "out_rows", "out_positions")
    numbers = ("num_decodes", "padding", "num_tokens", "spare_row", "spare_index", "table_stride")
    signature = dict.fromkeys((*arrays, "out_kv_index"), "*i64") | {"kv_table": "*i32"}
    unaligned = ("token_rows", "positions", "kv_index", "prompt_ids")
    yield Specialisation(
        "inputs", _stage_kernel, signature | dict.fromkeys(numbers, "i32"), {"BLOCK": BLOCK}, unaligned=unaligned
    )
    signature = {"token_ids": "*i64", "rows": "*i64", "relay": "*i64", "count": "i32", "rows_stride": "i32"}
    yield Specialisation("ids", _scatter_kernel, signature, {"BLOCK": BLOCK}, unaligned=("token_ids", "rows"))
