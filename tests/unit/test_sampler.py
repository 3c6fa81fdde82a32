"""The sampler against a plain reference: filters, draws, bans, and independence from what else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.worker.sampler import Sampler, SamplingBatch
from backend_lib.worker.sequence import Sequence
from kernels.philox import gumbel_noise

V = 50
CPU = torch.device("cpu")


def new_sequence(row: int = 0, **fields) -> Sequence:
    sequence = Sequence(
        slot=row, generation=1, prompt_ids=np.zeros(3, np.int32), output_ids=np.zeros(9, np.int32), max_tokens=9,
        **fields,
    )  # fmt: skip
    sequence.row, sequence.num_planned = row, 1
    return sequence


def sample(logits: torch.Tensor, sequences: list[Sequence], positions: list[int], num_rows: int = 8) -> list[int]:
    sampler = Sampler(num_rows, CPU)
    for sequence in sequences:
        sampler.set_row(sequence)
    return sampler.sample(logits.clone(), SamplingBatch.of(sequences, positions)).tolist()


def kept_tokens(logits: torch.Tensor, sequence: Sequence) -> list[int]:
    """What top-k and then top-p leave of [V] logits; of equals the lower id is the better."""
    order = sorted((token for token in range(len(logits)) if logits[token] > -torch.inf), key=lambda t: (-logits[t], t))
    order = order[: sequence.top_k or None]
    weights = [float(torch.exp((logits[t] - logits[order[0]]).double() / sequence.temperature)) for t in order]
    mass, kept = 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if mass / sum(weights) >= sequence.top_p:
            break
        kept.append(token)
        mass += weight
    return kept


def reference(logits: torch.Tensor, sequence: Sequence, position: int) -> int:
    """One row, straight from the definition."""
    logits = logits.clone()
    logits[list(sequence.banned_token_ids)] = -torch.inf
    if sequence.temperature == 0:
        return int(logits.argmax())
    seed = int(np.uint64(sequence.seed).astype(np.int64))
    key = (torch.tensor([seed]), torch.tensor([sequence.sequence_index]), torch.tensor([position]))
    scores = logits / sequence.temperature + gumbel_noise(*key, len(logits))[0]
    return max(kept_tokens(logits, sequence), key=lambda token: scores[token])


SEEDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**63 - 1, 2**63, 2**64 - 1]))
SEQUENCES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, V - 1]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-6, 0.31, 0.9]),
        "seed": SEEDS,
        "sequence_index": st.integers(0, 3),
        "min_tokens": st.integers(0, 1),
        "eos_token_ids": st.sampled_from([frozenset(), frozenset({3}), frozenset(range(V - 1))]),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.lists(SEQUENCES, min_size=1, max_size=8), st.integers(0, 2**31), st.data())
def test_every_row_gets_what_it_gets_alone(fields: list[dict], seed: int, data) -> None:
    rows = data.draw(st.permutations(range(len(fields))))
    sequences = [new_sequence(row, **each) for row, each in zip(rows, fields, strict=True)]
    positions = [3 + place for place in range(len(fields))]
    logits = torch.randn(len(fields), V, generator=torch.Generator().manual_seed(seed)) * 3
    together = sample(logits, sequences, positions)
    assert together == [reference(*each) for each in zip(logits, sequences, positions, strict=True)]
    for place, sequence in enumerate(sequences):
        assert sample(logits[place : place + 1], [sequence], positions[place : place + 1]) == [together[place]]


@settings(max_examples=100, deadline=None)
@given(st.lists(SEQUENCES, min_size=2, max_size=4), st.integers(0, 2**31))
def test_equal_logits_are_told_apart_by_id_whatever_else_is_in_the_batch(fields: list[dict], seed: int) -> None:
    sequences = [new_sequence(row, **each) for row, each in enumerate(fields)]
    logits = torch.randint(0, 3, (len(fields), V), generator=torch.Generator().manual_seed(seed)).float()
    positions = [5] * len(fields)
    expected = [reference(*each) for each in zip(logits, sequences, positions, strict=True)]
    assert sample(logits, sequences, positions) == expected


def test_temperature_zero_is_greedy() -> None:
    logits = torch.randn(4, V)
    assert sample(logits, [new_sequence(row) for row in range(4)], [3] * 4) == logits.argmax(1).tolist()


@pytest.mark.parametrize("fields", [{}, {"top_k": 6}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.7, "temperature": 2.0}])
def test_tokens_come_as_often_as_they_should(fields: dict) -> None:
    """Chi-square over 4,000 draws; the bound is the 99.9 % point, and the seeds are fixed."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 1.5
    sequence = new_sequence(**{"temperature": 1.0, "seed": 1234} | fields)
    draws = []
    sampler = Sampler(1, CPU)
    sampler.set_row(sequence)
    for start in range(0, 4000, 500):
        batch = SamplingBatch.of([sequence] * 500, list(range(start, start + 500)))
        draws += sampler.sample(logits.repeat(500, 1), batch).tolist()
    kept = kept_tokens(logits, sequence)
    assert set(draws) <= set(kept)
    expected = torch.softmax(logits[kept].double() / sequence.temperature, 0) * len(draws)
    observed = torch.bincount(torch.tensor(draws), minlength=V)[kept].double()
    degrees = len(kept) - 1
    bound = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3  # Wilson and Hilferty
    assert float(((observed - expected) ** 2 / expected).sum()) < bound


@pytest.mark.parametrize("top_p, kept", [(0.5, 1), (0.51, 2), (0.75, 2), (0.8, 3), (1e-9, 1)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: int) -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()  # powers of two: exact
    sequence = new_sequence(temperature=1.0, top_p=top_p)
    batch = SamplingBatch.of([sequence] * 400, list(range(400)))
    sampler = Sampler(1, CPU)
    sampler.set_row(sequence)
    assert sorted(set(sampler.sample(logits.repeat(400, 1), batch).tolist())) == list(range(kept))


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
def test_banned_tokens_are_not_drawn_however_likely(fields: dict) -> None:
    logits = torch.zeros(1, V)
    logits[0, [3, 4]] = 50.0
    logits[0, 5] = 20.0
    sequence = new_sequence(min_tokens=1, eos_token_ids=frozenset({3}), stop_token_ids=frozenset({4}), **fields)
    assert sample(logits, [sequence], [3]) == [5]
    sequence.num_planned = 2
    assert sample(logits, [sequence], [3])[0] in (3, 4)


def test_a_row_that_changes_hands_keeps_nothing() -> None:
    sampler = Sampler(1, CPU)
    logits = torch.randn(1, V)
    for fields in ({"temperature": 2.0, "top_k": 3, "top_p": 0.1, "seed": 2**64 - 1, "sequence_index": 2}, {}):
        sequence = new_sequence(**fields)
        sampler.set_row(sequence)
        found = sampler.sample(logits.clone(), SamplingBatch.of([sequence], [4])).tolist()
        assert found == [reference(logits[0], sequence, 4)]


def test_a_seed_of_64_bits_is_used_whole() -> None:
    logits = torch.zeros(1, 4096)
    sequences = [new_sequence(temperature=1.0, seed=seed) for seed in (1, 1 + 2**32, 1 + 2**63)]
    assert len({sample(logits, [sequence], [3])[0] for sequence in sequences}) == 3
