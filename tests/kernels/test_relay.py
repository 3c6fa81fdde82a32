"""A step's inputs from the relay table, and its tokens into it."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import relay as module
from kernels.relay import reference_scatter_ids, reference_stage_inputs, scatter_ids, stage_inputs

SPARE_INDEX = 999


@settings(max_examples=40, deadline=None)
@given(
    num_decodes=st.integers(0, 20), padding=st.integers(0, 20), prompts=st.integers(0, 20),
    block=st.sampled_from([8, 16, 64]), seed=st.integers(0, 1 << 30),
)  # fmt: skip
def test_inputs(num_decodes: int, padding: int, prompts: int, block: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, count = 30, num_decodes + prompts
    token_rows = torch.randperm(rows, generator=generator)[:num_decodes]
    token_rows = torch.cat([token_rows, torch.randint(rows, (prompts,), generator=generator)])
    places = torch.randperm(50, generator=generator)[:count]
    kv_index, prompt_ids = (torch.randint(1 << 30, (size,), generator=generator) for size in (count, prompts))
    relay = torch.randint(-1, 1 << 40, (rows + 1,), generator=generator)
    tables = [torch.full((rows + 1, 50), -7, dtype=torch.int32) for _ in range(2)]
    length = num_decodes + padding + prompts
    outputs = [[torch.full((length + 64,), -5) for _ in range(4)] for _ in range(2)]
    before, module.BLOCK = module.BLOCK, block
    for stage, table, output in zip((stage_inputs, reference_stage_inputs), tables, outputs, strict=True):
        stage(
            token_rows, places, kv_index, prompt_ids, relay, table, *(each[:length] for each in output),
            num_decodes=num_decodes, padded=num_decodes + padding, spare_row=rows, spare_index=SPARE_INDEX,
        )  # fmt: skip
    module.BLOCK = before
    assert torch.equal(*tables)
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)


def test_padding_is_the_spare_row_at_its_first_position() -> None:
    outputs = [torch.full((4,), -5) for _ in range(4)]
    one = torch.tensor([2])
    stage_inputs(
        one, torch.tensor([7]), torch.tensor([40]), one[:0], torch.tensor([0, 0, 33, 0]),
        torch.zeros((4, 9), dtype=torch.int32), *outputs, num_decodes=1, padded=4, spare_row=3, spare_index=77,
    )  # fmt: skip
    assert [each.tolist() for each in outputs] == [[33, 0, 0, 0], [2, 3, 3, 3], [7, 0, 0, 0], [40, 77, 77, 77]]


@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, 300), stride=st.integers(1, 3), seed=st.integers(0, 1 << 30))
def test_tokens(count: int, stride: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randperm(400, generator=generator) for _ in range(stride)]
    rows = torch.stack(columns, dim=1)[:count, stride - 1]
    token_ids = torch.randint(1 << 40, (count,), generator=generator)
    tables = [torch.full((401,), -1) for _ in range(2)]
    scatter_ids(token_ids, rows, tables[0])
    reference_scatter_ids(token_ids, rows, tables[1])
    assert torch.equal(*tables)


def test_rows_of_padding_go_to_the_spare_one() -> None:
    table = torch.full((4,), -1)
    scatter_ids(torch.tensor([5, 6, 7]), torch.tensor([1, 3, 3]), table)
    assert table[:3].tolist() == [-1, 5, -1] and table[3] in (6, 7)
