"""How a decoder is divided among the ranks of a group: what each of them holds (Shoeybi et al., 2019).

Query heads go with the key-value heads that they share, so that a rank attends by itself. Attention and MLP are cut
along their inner size: a rank computes some of it, and what comes out of it is a part of a sum over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from backend_lib.checkpoint import DecoderConfig, check_ranks, inner_unit
from backend_lib.models.linear import GROUP

MOST_RANKS = 64  # as the setting allows

# H query heads · K key-value heads · V vocabulary


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank holds. Ranges are places in the whole.

    Attributes:
        whole: the decoder that is divided.
        config: the rank's part as a decoder of its own: heads, inner sizes and vocabulary are the rank's.
        query_heads, kv_heads: of H and K. Each key-value head is shared by equally many of the query heads.
        inner, expert_inner: of the inner sizes of an MLP, and of every expert.
        vocabulary: of V. `config.vocab_size` rows are kept, as many as on any other rank: zeros fill them up.
    """

    whole: DecoderConfig
    config: DecoderConfig
    query_heads: range
    kv_heads: range
    inner: range
    expert_inner: range
    vocabulary: range


def divide(config: DecoderConfig, size: int) -> list[Share]:
    """The share of each of `size` ranks.

    Raises ValueError naming `tensor_parallel` where there is nothing left for a rank to compute.
    """
    check_ranks(config, size)
    experts_inner = config.experts.intermediate_size if config.experts else 0
    return [
        _share(config, *parts)
        for parts in zip(
            _heads(config, size), _inner(config.intermediate_size, size), _inner(experts_inner, size),
            _vocabulary(config.vocab_size, size), strict=True,
        )
    ]  # fmt: skip


def check_groups(config: DecoderConfig, size: int, weights: str) -> None:
    """Raises ValueError naming `tensor_parallel` where weights in codes, `int8` or `int4`, would be cut within a group
    of those, though the whole can be cut into groups. Inner sizes are divided between groups as it is."""
    if config.num_heads * config.head_dim % GROUP or _keeps_groups(config, size):
        return
    allowed = [each for each in range(1, min(config.num_heads, MOST_RANKS) + 1) if _keeps_groups(config, each)]
    raise ValueError(
        f"parameter 'tensor_parallel' is {size}; with 'weights' {weights} allowed for this checkpoint are "
        f"{', '.join(map(str, allowed))}: every rank's heads, of {config.head_dim} values, must fill groups of {GROUP}"
    )


def _keeps_groups(config: DecoderConfig, size: int) -> bool:
    return all(len(query_heads) * config.head_dim % GROUP == 0 for query_heads, _ in _heads(config, size))


def _share(config: DecoderConfig, heads: tuple[range, range], inner: range, expert_inner: range, rows: range) -> Share:
    query_heads, kv_heads = heads
    own = replace(
        config, num_heads=len(query_heads), num_kv_heads=len(kv_heads), intermediate_size=len(inner),
        vocab_size=len(rows), experts=config.experts and replace(config.experts, intermediate_size=len(expert_inner)),
    )  # fmt: skip
    vocabulary = range(min(rows.start, config.vocab_size), min(rows.stop, config.vocab_size))
    return Share(
        whole=config, config=own, query_heads=query_heads, kv_heads=kv_heads, inner=inner, expert_inner=expert_inner,
        vocabulary=vocabulary,
    )  # fmt: skip


def _heads(config: DecoderConfig, size: int) -> list[tuple[range, range]]:
    """Each rank's query heads and key-value heads."""
    group = config.num_heads // config.num_kv_heads
    if config.num_kv_heads >= size:
        return [(scaled(heads, group), heads) for heads in even(config.num_kv_heads, size)]
    # Several ranks have the same key-value head, and some of its query heads each.
    return [
        (range(head * group + part.start, head * group + part.stop), range(head, head + 1))
        for head, ranks in enumerate(even(size, config.num_kv_heads))
        for part in even(group, len(ranks))
    ]


def _inner(inner: int, size: int) -> list[range]:
    unit = inner_unit(inner)
    return [scaled(units, unit) for units in even(inner // unit, size)]


def _vocabulary(vocab_size: int, size: int) -> list[range]:
    rows = -(-vocab_size // size)
    return [range(rank * rows, (rank + 1) * rows) for rank in range(size)]


def even(total: int, parts: int) -> list[range]:
    """0 to `total` in consecutive ranges whose lengths differ by one at most, longer ones first."""
    length, longer = divmod(total, parts)
    starts = [part * length + min(part, longer) for part in range(parts + 1)]
    return [range(*each) for each in pairwise(starts)]


def scaled(units: range, size: int) -> range:
    return range(units.start * size, units.stop * size)
