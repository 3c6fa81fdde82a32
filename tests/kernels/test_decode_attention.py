"""Attention of one new token per sequence: the plan's items, and the result against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.decode_attention import DecodePlan, decode_attention, plan_decode, reference_decode_attention
from kernels.tuning import Config
from tests.support.attention import Cached, assert_close, bits, cache, queries

BLOCK = 16


def allocate(
    max_rows: int, shape: tuple[int, int, int], dtype: torch.dtype, *, window: int | None = None, programs: int = 8,
    block: int = BLOCK,
) -> DecodePlan:  # fmt: skip
    """`programs`: of the whole device."""
    config = Config({"N": block, "programs": 1}, num_warps=4, num_stages=2)
    plan = DecodePlan.allocate(
        max_rows, shape, dtype=dtype, device="cpu", window=window, multiprocessors=programs, config=config
    )
    plan.partial.fill_(torch.nan)
    plan.log_sums.fill_(torch.nan)
    plan.items.fill_(-1)
    plan.row_items.fill_(-1)
    return plan


def planned(lengths: list[int], *, programs: int, window: int | None = None, max_rows: int | None = None) -> DecodePlan:
    plan = allocate(max_rows or len(lengths), (1, 1, 16), torch.float32, window=window, programs=programs)
    plan_decode(torch.tensor(lengths) - 1, plan, window=window)
    return plan


def check_items(plan: DecodePlan, lengths: list[int]) -> None:
    """Each row's items are its tokens, cut in whole blocks, none empty; they are within the grid, the longest first."""
    num_items = int(plan.num_items)
    assert num_items <= plan.target + len(lengths) <= len(plan.items)
    assert (plan.items[num_items:] == -1).all() and (plan.row_items[len(lengths) :] == -1).all()
    owner = plan.items[:num_items, 0]
    found = 0
    for row, length in enumerate(lengths):
        first, last = plan.row_items[row].tolist()
        assert (owner[first:last] == row).all() and last > first
        begins, ends = plan.items[first:last, 1], plan.items[first:last, 2]
        assert begins[0] == (0 if plan.window is None else max(0, length - plan.window)) and ends[-1] == length
        assert (ends > begins).all() and (ends[:-1] == begins[1:]).all() and ((ends - begins)[:-1] % BLOCK == 0).all()
        found += last - first
    assert found == num_items
    blocks = -(-(plan.items[:num_items, 2] - plan.items[:num_items, 1]) // BLOCK)
    longest = torch.tensor([int(blocks[owner == row].max()) for row in owner.tolist()])
    assert (longest.diff() <= 0).all()


lengths = st.one_of(st.integers(1, 50), st.integers(1, 2000), st.just(1 << 20))


@given(
    st.lists(lengths, min_size=1, max_size=8),
    st.integers(1, 600),
    st.sampled_from([None, 1, 100, 4096]),
    st.integers(0, 9),
)
@settings(max_examples=30, deadline=None)
def test_items_are_the_rows(lengths: list[int], programs: int, window: int | None, unused: int) -> None:
    plan = planned(lengths, programs=programs, window=window, max_rows=len(lengths) + unused)
    check_items(plan, lengths)
    seen = sum(min(length, window or length) for length in lengths)
    size = int((plan.items[: int(plan.num_items), 2] - plan.items[: int(plan.num_items), 1]).max())
    assert size <= -(-seen // programs) + BLOCK


@pytest.mark.parametrize("first", [1, 1 << 17])
def test_many_rows_fill_the_grid_and_no_more(first: int) -> None:
    lengths = [1] * 200 + [first] + [1] * 11
    plan = planned(lengths, programs=66)
    check_items(plan, lengths)
    assert int(plan.num_items) == 211 + (1 if first == 1 else 66)
    assert plan.row_items[200, 0] == (200 if first == 1 else 0)


def run(
    cached: Cached,
    query: torch.Tensor,
    rows: list[int],
    positions: list[int],
    plan: DecodePlan,
    **options: float | None,
) -> torch.Tensor:
    """The result, after looking that nothing else was written."""
    before = bits(cached.pool).clone(), cached.table.clone(), bits(query).clone()
    out = torch.full((len(rows) + 1, query.shape[1] * query.shape[2]), torch.nan, dtype=query.dtype)
    at = torch.tensor(positions)
    plan_decode(at, plan, window=plan.window)
    decode_attention(
        query, cached.pool, cached.table, torch.tensor(rows), at, plan, window=plan.window, out=out[:-1], **options
    )
    assert out[-1].isnan().all() and torch.equal(before[1], cached.table)
    assert torch.equal(before[0], bits(cached.pool)) and torch.equal(before[2], bits(query))
    return out[:-1]


@given(
    kv_lens=st.lists(st.one_of(st.just(1), st.integers(1, 150)), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 3, 4, 7, 16, 17]), kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([16, 64, 80, 96]),
    dtype=st.sampled_from([torch.float16, torch.float32]), window=st.sampled_from([None, None, 1, 17, 64]),
    softcap=st.sampled_from([None, 2.0, 50.0]), programs=st.sampled_from([1, 8, 64]), seed=st.integers(0, 1 << 30),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_like_the_reference(
    kv_lens: list[int], group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None,
    softcap: float | None, programs: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    seen = [range(0 if window is None else max(0, length - window), length) for length in kv_lens]
    cached = cache(seen, kv_heads, head_dim, dtype)
    heads = group * kv_heads
    rows = [*torch.randperm(len(kv_lens)).tolist(), cached.spare_row]
    positions = [kv_lens[row] - 1 for row in rows[:-1]] + [0]
    query = queries(len(rows), heads, kv_heads, head_dim, dtype)
    plan = allocate(len(rows) + 1, (heads, kv_heads, head_dim), dtype, window=window, programs=programs)
    options = {"scale": 2 * head_dim**-0.5, "softcap": softcap}
    ours = run(cached, query, rows, positions, plan, **options)
    exact = torch.empty(ours.shape, dtype=torch.float64)
    reference_decode_attention(
        query,
        cached.pool,
        cached.table,
        torch.tensor(rows),
        torch.tensor(positions),
        window=window,
        out=exact,
        **options,
    )
    assert_close(ours, exact)


def test_a_row_has_the_same_bits_in_any_place_and_company_if_it_is_cut_alike() -> None:
    torch.manual_seed(0)
    kv_lens = [100, 1, 33, 150, 80]
    cached = cache([range(length) for length in kv_lens], 2, 64, torch.float16)
    query = queries(5, 4, 2, 64, torch.float16)
    plan = allocate(5, (4, 2, 64), torch.float16, programs=12)

    def attend(rows: list[int]) -> torch.Tensor:
        return run(cached, query[rows], rows, [kv_lens[row] - 1 for row in rows], plan, scale=0.2)

    together = attend([0, 1, 2, 3, 4])
    assert torch.equal(attend([3, 4, 1, 0, 2]), together[[3, 4, 1, 0, 2]])
    assert int(plan.num_items) > 5  # so rows were merged
    assert_close(attend([3]), together[3:4].double())  # cut at other places
    assert torch.equal(attend([1]), together[1:2])  # a lone item


def test_one_very_long_row_and_a_pool_of_more_than_31_bits() -> None:
    """Few tokens, at the far end of the pool, stand for many. The items' highest scores rise along the row."""
    torch.manual_seed(0)
    size = (1 << 31) // (2 * 64) + 100
    pool = torch.empty(size, 2, 1, 64, dtype=torch.float16)  # memory that is never touched takes none
    pool[-64:] = torch.randn(64, 2, 1, 64) * torch.arange(1, 65)[:, None, None, None] ** 0.5 / 8
    table = (size - 64 + torch.arange(1 << 17) // (1 << 11)).expand(2, -1).int()
    query = queries(2, 4, 1, 64, torch.float16)
    plan = allocate(2, (4, 1, 64), torch.float16, programs=40, block=2048)
    rows, positions = torch.tensor([1, 0]), torch.tensor([(1 << 17) - 1, 0])
    out, exact = torch.empty(2, 256, dtype=torch.float16), torch.empty(2, 256, dtype=torch.float64)
    plan_decode(positions, plan, window=None)
    decode_attention(query, pool, table, rows, positions, plan, scale=0.2, out=out)
    reference_decode_attention(query, pool, table, rows, positions, scale=0.2, out=exact)
    assert_close(out, exact)
