"""Which part of a decoder each rank is given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend_lib.checkpoint import DecoderConfig, ExpertsConfig, LayerConfig
from backend_lib.models.division import check_groups, divide

SMOLLM2 = {"num_heads": 9, "num_kv_heads": 3, "vocab_size": 49152, "intermediate_size": 1536, "hidden_size": 576}


def config(**fields: Any) -> DecoderConfig:
    usual: dict[str, Any] = {
        "architecture": "LlamaForCausalLM", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
        "layers": (LayerConfig(rope=None),), "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
        "max_position": 64,
    }  # fmt: skip
    return DecoderConfig(**(usual | fields))


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "inner"),
    [
        (1, [9], [3], [1536]),
        (2, [6, 3], [2, 1], [768, 768]),
        (3, [3, 3, 3], [1, 1, 1], [512, 512, 512]),
        (4, [2, 1, 3, 3], [1, 1, 1, 1], [384, 384, 384, 384]),
        (5, [2, 1, 2, 1, 3], [1, 1, 1, 1, 1], [320, 320, 320, 288, 288]),
        (9, [1] * 9, [1] * 9, [192] * 3 + [160] * 6),
    ],
)
def test_smollm2(size: int, heads: list[int], kv_heads: list[int], inner: list[int]) -> None:
    shares = divide(config(**SMOLLM2), size)
    assert [share.config.num_heads for share in shares] == heads
    assert [share.config.num_kv_heads for share in shares] == kv_heads
    assert [share.config.intermediate_size for share in shares] == inner
    assert [len(share.vocabulary) for share in shares[:-1]] == [-(-49152 // size)] * (size - 1)


def test_one_rank_has_the_whole() -> None:
    whole = config(experts=ExpertsConfig(count=4, used=2, intermediate_size=28), intermediate_size=77)
    (share,) = divide(whole, 1)
    assert share.config == share.whole == whole
    ranges = share.query_heads, share.kv_heads, share.inner, share.expert_inner, share.vocabulary
    assert ranges == (range(4), range(2), range(77), range(28), range(512))


@given(
    kv_heads=st.integers(1, 12), group=st.integers(1, 8), inner=st.integers(64, 700), vocab_size=st.integers(1, 300),
    data=st.data(),
)  # fmt: skip
def test_nothing_is_left_out_or_counted_twice(
    kv_heads: int, group: int, inner: int, vocab_size: int, data: st.DataObject
) -> None:
    units = inner // 32 if inner % 32 == 0 else inner
    size = data.draw(st.integers(1, min(kv_heads * group, units, 64)))
    whole = config(
        num_heads=kv_heads * group, num_kv_heads=kv_heads, intermediate_size=inner, vocab_size=vocab_size,
        experts=ExpertsConfig(count=3, used=1, intermediate_size=inner),
    )  # fmt: skip
    shares = divide(whole, size)
    for ranges, total in (
        ([share.query_heads for share in shares], kv_heads * group),
        ([share.inner for share in shares], inner),
        ([share.expert_inner for share in shares], inner),
        ([share.vocabulary for share in shares], vocab_size),
    ):
        assert [place for each in ranges for place in each] == list(range(total))
    for share in shares:
        own = share.config
        assert own.num_heads == len(share.query_heads) > 0 and own.intermediate_size == len(share.inner) > 0
        assert own.num_kv_heads == len(share.kv_heads)
        assert own.vocab_size == -(-vocab_size // size) >= len(share.vocabulary)
        assert own.experts and own.experts.intermediate_size == len(share.expert_inner)
        # As attention counts: a rank's query heads share its key-value heads evenly and in order.
        for place, head in enumerate(share.query_heads):
            assert share.kv_heads[place // (own.num_heads // own.num_kv_heads)] == head // group


@pytest.mark.parametrize(("inner", "unit"), [(96, 32), (100, 1)])
def test_groups_of_codes_stay_whole(inner: int, unit: int) -> None:
    lengths = [len(share.inner) for share in divide(config(intermediate_size=inner), 2)]
    assert lengths == {32: [64, 32], 1: [50, 50]}[unit]


EXPERTS = {
    "layers": (LayerConfig(rope=None, has_experts=True),),
    "experts": ExpertsConfig(count=4, used=2, intermediate_size=64),
}


@pytest.mark.parametrize(
    ("fields", "most", "why"),
    [
        ({}, 3, "an MLP of inner size 96, which is divided in units of 32"),
        ({"intermediate_size": 4096}, 4, "4 query heads"),
        ({"intermediate_size": 3}, 3, "an MLP of inner size 3, which is divided in units of 1"),
        (EXPERTS, 2, "an expert of inner size 64, which is divided in units of 32"),
    ],
)
def test_too_many_ranks(fields: dict[str, Any], most: int, why: str) -> None:
    assert len(divide(config(**fields), most)) == most
    message = rf"parameter 'tensor_parallel' is {most + 1}; allowed for this checkpoint is at most {most}: it has {why}"
    with pytest.raises(ValueError, match=message):
        divide(config(**fields), most + 1)


def test_an_mlp_that_no_layer_has_limits_nothing() -> None:
    assert len(divide(config(**(EXPERTS | {"intermediate_size": 1})), 2)) == 2


def test_heads_that_fill_no_groups_of_codes() -> None:
    """Heads of 48 do in pairs; 12 heads that share 6 are divided so among up to 6 ranks."""
    whole = config(num_heads=12, num_kv_heads=6, head_dim=48, intermediate_size=4096)
    for size in (1, 2, 3, 4, 5, 6):
        check_groups(whole, size, "int8")
    message = (
        r"'tensor_parallel' is 7; with 'weights' int8 allowed for this checkpoint are 1, 2, 3, 4, 5, 6: "
        r"every rank's heads, of 48 values, must fill groups of 32"
    )
    with pytest.raises(ValueError, match=message):
        check_groups(whole, 7, "int8")


def test_a_whole_that_fills_no_groups_is_not_the_divisions_fault() -> None:
    check_groups(config(num_heads=3, num_kv_heads=3, head_dim=20), 3, "int4")
