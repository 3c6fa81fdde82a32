"""Attention of chunks of prompts, with cached prefixes, against float64."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.prefill_attention import prefill_attention, reference_prefill_attention
from kernels.tuning import Config
from tests.support.attention import assert_close, bits, cache, queries

# Query tokens, and tokens before them.
chunk = st.tuples(
    st.one_of(st.just(1), st.integers(1, 40)), st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 120))
)


@given(
    parts=st.lists(chunk, min_size=1, max_size=3), group=st.sampled_from([1, 2, 3, 4, 7, 16]),
    kv_heads=st.integers(1, 2), head_dim=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from([torch.float16, torch.float32]), window=st.sampled_from([None, None, 1, 9, 16, 40, 100]),
    softcap=st.sampled_from([None, 2.0, 50.0]), blocks=st.sampled_from([(16, 16), (64, 16), (32, 32)]),
    longer=st.integers(0, 70), seed=st.integers(0, 1 << 30),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_like_the_reference(
    parts: list[tuple[int, int]], group: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None,
    softcap: float | None, blocks: tuple[int, int], longer: int, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    seen = [range(0 if window is None else max(0, cached - window + 1), cached + length) for length, cached in parts]
    cached = cache(seen, kv_heads, head_dim, dtype)
    heads, tokens = group * kv_heads, sum(length for length, _ in parts)
    # A token of no chunk before and after; a chunk of nothing at the end.
    chunks, first = [], 1
    for row in torch.randperm(len(parts)).tolist():
        length, before = parts[row]
        chunks.append([first, row, length, before + length])
        first += length
    chunks.append([first, 0, 0, 7])
    table = torch.tensor(chunks, dtype=torch.int32)
    query = queries(tokens + 2, heads, kv_heads, head_dim, dtype)
    query[[0, -1]] = torch.nan
    out = torch.full((tokens + 2, heads * head_dim), torch.nan, dtype=dtype)
    exact = out.double()
    before = bits(cached.pool).clone(), bits(query).clone()
    options = {
        "max_query_len": max(length for length, _ in parts) + longer, "scale": 2 * head_dim**-0.5, "softcap": softcap,
        "window": window,
    }  # fmt: skip
    config = Config({"M": blocks[0], "N": blocks[1]}, num_warps=4, num_stages=2)
    prefill_attention(query, cached.pool, cached.table, table, out=out, config=config, **options)
    reference_prefill_attention(query, cached.pool, cached.table, table, out=exact, **options)
    assert torch.equal(before[0], bits(cached.pool)) and torch.equal(before[1], bits(query))
    assert out[[0, -1]].isnan().all()
    assert_close(out[1:-1], exact[1:-1])


def test_the_end_of_a_pool_of_more_than_31_bits() -> None:
    torch.manual_seed(0)
    size = (1 << 31) // (2 * 64) + 100
    pool = torch.empty(size, 2, 1, 64, dtype=torch.float16)  # memory that is never touched takes none
    pool[-20:] = torch.randn(20, 2, 1, 64)
    table = torch.arange(size - 20, size, dtype=torch.int32)[None]
    chunks = torch.tensor([[0, 0, 8, 20]], dtype=torch.int32)
    query = queries(8, 2, 1, 64, torch.float16)
    out, exact = torch.empty(8, 128, dtype=torch.float16), torch.empty(8, 128, dtype=torch.float64)
    prefill_attention(query, pool, table, chunks, max_query_len=8, scale=0.2, out=out)
    reference_prefill_attention(query, pool, table, chunks, max_query_len=8, scale=0.2, out=exact)
    assert_close(out, exact)
