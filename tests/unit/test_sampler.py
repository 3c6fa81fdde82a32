"""The sampler against a plain reference: filters, draws, bans, and independence from what else is in the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.arena import logprob_row
from backend_lib.worker.eager_sampling import EagerSampling
from backend_lib.worker.inputs import FreshInputs, StagedBatch
from backend_lib.worker.logit_rules import LogitRules
from backend_lib.worker.logprobs import logprob_rows
from backend_lib.worker.sampler import Sampler
from backend_lib.worker.sampling import SamplingBatch, StartedRows
from backend_lib.worker.scheduler import Chunk, Plan
from backend_lib.worker.sequence import Sequence
from kernels.philox import gumbel_noise

V = 50
CPU = torch.device("cpu")


PROMPT, OUTPUT = [0, 7, 7], [0, 4, 4, 11]


def new_sequence(row: int = 0, rules: dict | None = None, **fields) -> Sequence:
    """`rules` as a slot's parameter blob has them."""
    output_ids = np.array(OUTPUT + [0] * 5, np.int32)
    sequence = Sequence(
        slot=row, generation=1, prompt_ids=np.array(PROMPT, np.int32), output_ids=output_ids, max_tokens=9,
        rules=LogitRules.from_blob(rules or {}), **fields,
    )  # fmt: skip
    sequence.row = row
    return sequence


def sample(logits: torch.Tensor, sequences: list[Sequence], positions: list[int], num_rows: int = 8) -> list[int]:
    sampler = Sampler(num_rows, CPU, EagerSampling())
    for sequence in sequences:
        sampler.start(StartedRows.of([sequence]), V)
    return sampler.sample(logits.clone(), SamplingBatch.of(sequences, positions, V)).token_ids.tolist()


def kept_tokens(logits: torch.Tensor, sequence: Sequence) -> list[int]:
    """What min-p, top-k and then top-p leave of [V] logits; of equals the lower id is the better."""
    order = sorted((token for token in range(len(logits)) if logits[token] > -torch.inf), key=lambda t: (-logits[t], t))
    scores = logits / max(sequence.temperature, 1e-9)
    least = scores[order[0]] + (math.log(sequence.min_p) if sequence.min_p else -math.inf)
    order = [token for token in order if scores[token] >= least][: sequence.top_k or None]
    weights = [float(torch.exp((logits[t] - logits[order[0]]).double() / sequence.temperature)) for t in order]
    mass, kept = 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if mass / sum(weights) >= sequence.top_p:
            break
        kept.append(token)
        mass += weight
    return kept


def changed(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """[V] logits after everything that comes before the draw, token by token, in vLLM's order."""
    rules, logits = sequence.rules or LogitRules(), logits.clone()
    output = sequence.output_ids[: sequence.output_len].tolist()
    biases = dict(zip(rules.bias_ids.tolist(), rules.bias.tolist(), strict=True))
    for token in range(len(logits)):
        score, count = float(logits[token]), output.count(token)
        if rules.allowed is not None and token not in rules.allowed.tolist():
            score = -math.inf
        if token in sequence.banned_token_ids:
            score = -math.inf
        score += biases.get(token, 0)
        if count or token in sequence.prompt_ids:
            score = score / rules.repetition_penalty if score > 0 else score * rules.repetition_penalty
        logits[token] = score - rules.frequency_penalty * count - rules.presence_penalty * bool(count)
    return logits


def reference(logits: torch.Tensor, sequence: Sequence, position: int) -> int:
    """One row, straight from the definition."""
    logits = changed(logits, sequence)
    if sequence.temperature == 0:
        return int(logits.argmax())
    seed = int(np.uint64(sequence.seed).astype(np.int64))
    key = (torch.tensor([seed]), torch.tensor([sequence.sequence_index]), torch.tensor([position]))
    scores = logits / sequence.temperature + gumbel_noise(*key, len(logits))[0]
    return max(kept_tokens(logits, sequence), key=lambda token: scores[token])


SEEDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**63 - 1, 2**63, 2**64 - 1]))
RULES = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.5]),
        "presence_penalty": st.sampled_from([-1.0, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 1.5]),
        "logit_bias": st.just([[4, 3.5], [7, -100.0], [20, 2.0]]),
        "bad_words": st.just([[11, 21], [22], [0, 4, 23], [4, 4, 11, 24], [12, 11, 25]]),
        "allowed_token_ids": st.just([0, 4, 7, 21, 22, 30]),
    },
)
SEQUENCES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, V - 1]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-6, 0.31, 0.9]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
        "rules": st.one_of(st.just({}), RULES),
        "output_len": st.integers(0, len(OUTPUT)),
        "seed": SEEDS,
        "sequence_index": st.integers(0, 3),
        "min_tokens": st.integers(0, 5),
        "eos_token_ids": st.sampled_from([frozenset(), frozenset({3, 0}), frozenset(range(8, V - 1))]),
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


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"top_k": 6}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.7, "temperature": 2.0}, {"min_p": 0.2},
        {"min_p": 0.1, "top_k": 9, "temperature": 1.5},
    ],
)  # fmt: skip
def test_tokens_come_as_often_as_they_should(fields: dict) -> None:
    """Chi-square over 4,000 draws; the bound is the 99.9 % point, and the seeds are fixed."""
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 1.5
    sequence = new_sequence(**{"temperature": 1.0, "seed": 1234} | fields)
    draws = []
    sampler = Sampler(1, CPU, EagerSampling())
    sampler.start(StartedRows.of([sequence]), V)
    for start in range(0, 4000, 500):
        batch = SamplingBatch.of([sequence] * 500, list(range(start, start + 500)), V)
        draws += sampler.sample(logits.repeat(500, 1), batch).token_ids.tolist()
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
    batch = SamplingBatch.of([sequence] * 400, list(range(400)), V)
    sampler = Sampler(1, CPU, EagerSampling())
    sampler.start(StartedRows.of([sequence]), V)
    assert sorted(set(sampler.sample(logits.repeat(400, 1), batch).token_ids.tolist())) == list(range(kept))


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}])
def test_banned_tokens_are_not_drawn_however_likely(fields: dict) -> None:
    logits = torch.zeros(1, V)
    logits[0, [3, 4]] = 50.0
    logits[0, 5] = 20.0
    sequence = new_sequence(min_tokens=1, eos_token_ids=frozenset({3}), stop_token_ids=frozenset({4}), **fields)
    assert sample(logits, [sequence], [3]) == [5]
    sequence.output_len = 1
    assert sample(logits, [sequence], [3])[0] in (3, 4)


def test_a_row_that_changes_hands_keeps_nothing() -> None:
    sampler = Sampler(1, CPU, EagerSampling())
    logits = torch.randn(1, V)
    for fields in ({"temperature": 2.0, "top_k": 3, "top_p": 0.1, "seed": 2**64 - 1, "sequence_index": 2}, {}):
        sequence = new_sequence(**fields)
        sampler.start(StartedRows.of([sequence]), V)
        found = sampler.sample(logits.clone(), SamplingBatch.of([sequence], [4], V)).token_ids.tolist()
        assert found == [reference(logits[0], sequence, 4)]


def test_a_seed_of_64_bits_is_used_whole() -> None:
    logits = torch.zeros(1, 4096)
    sequences = [new_sequence(temperature=1.0, seed=seed) for seed in (1, 1 + 2**32, 1 + 2**63)]
    assert len({sample(logits, [sequence], [3])[0] for sequence in sequences}) == 3


def scores_of(values: dict[int, float]) -> torch.Tensor:
    logits = torch.full((1, V), -50.0)
    for token, value in values.items():
        logits[0, token] = value
    return logits


@pytest.mark.parametrize(
    "rules, values, best",
    [
        # A bias is there before the penalties: (2 + 4) / 2 is less than 4, and 2 / 2 + 4 is more.
        ({"repetition_penalty": 2.0, "logit_bias": [[0, 4.0]]}, {0: 2.0, 30: 4.0}, 30),
        # What is taken off comes after what is divided: 4 / 2 - 1 is less than 1.2, and (4 - 1) / 2 is more.
        ({"repetition_penalty": 2.0, "presence_penalty": 1.0}, {0: 4.0, 30: 1.2}, 30),
        # Once for each time that it came, and once in all.
        ({"frequency_penalty": 1.0}, {4: 3.0, 30: 1.5}, 30),
        ({"presence_penalty": 1.0}, {4: 3.0, 30: 1.5}, 4),
        # The prompt counts for one of the three.
        ({"repetition_penalty": 2.0}, {7: 3.0, 30: 2.0}, 30),
        ({"frequency_penalty": 2.0, "presence_penalty": 2.0}, {7: 3.0, 30: 2.0}, 7),
        # A logit below 0 is made less, not more.
        ({"repetition_penalty": 2.0}, {0: -3.0, 30: -4.0}, 30),
        # No bias brings back what is not allowed.
        ({"allowed_token_ids": [30], "logit_bias": [[31, 100.0]]}, {30: 0.0, 31: 0.0}, 30),
        ({"bad_words": [[31]], "logit_bias": [[31, 100.0]]}, {30: 0.0, 31: 0.0}, 30),
        # A bad word of several tokens is one only after its beginning.
        ({"bad_words": [[4, 11, 31]]}, {30: 0.0, 31: 1.0}, 30),
        ({"bad_words": [[11, 4, 31]]}, {30: 0.0, 31: 1.0}, 31),
    ],
)
def test_in_which_order_logits_are_changed(rules: dict, values: dict[int, float], best: int) -> None:
    sequence = new_sequence(rules=rules, output_len=len(OUTPUT))
    assert sample(scores_of(values), [sequence], [7]) == [best]


def test_a_sampled_token_is_counted_before_the_next_step() -> None:
    sequence = new_sequence(rules={"frequency_penalty": 1.0})
    sampler = Sampler(1, CPU, EagerSampling())
    sampler.start(StartedRows.of([sequence]), V)
    logits = scores_of({5: 2.5, 6: 1.0})
    drawn = [
        sampler.sample(logits.clone(), SamplingBatch.of([sequence], [3 + step], V)).token_ids.item()
        for step in range(4)
    ]
    assert drawn == [5, 5, 6, 5]  # 2.5, 1.5, 0.5 < 1.0, and then 0.5 > 0.0


def test_counters_begin_anew_with_each_sequence_of_a_row() -> None:
    sampler = Sampler(1, CPU, EagerSampling())
    for output_len, best in ((len(OUTPUT), 30), (0, 4)):
        sequence = new_sequence(rules={"frequency_penalty": 1.0}, output_len=output_len)
        sampler.start(StartedRows.of([sequence]), V)
        batch = SamplingBatch.of([sequence], [3 + output_len], V)
        assert sampler.sample(scores_of({4: 3.0, 30: 1.5}), batch).token_ids.tolist() == [best]


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    """Whatever is then done to them; as wide as the widest asks."""
    logits = torch.randn(3, V, generator=torch.Generator().manual_seed(3))
    sequences = [
        new_sequence(0, logprobs=np.zeros(9, logprob_row(1)), temperature=1.0, top_k=3, seed=7),
        new_sequence(1, rules={"logit_bias": [[9, 100.0]]}),
        new_sequence(2, logprobs=np.zeros(9, logprob_row(4)), rules={"logit_bias": [[9, 100.0]]}),
    ]
    sampler = Sampler(3, CPU, EagerSampling())
    for sequence in sequences:
        sampler.start(StartedRows.of([sequence]), V)
    sampled = sampler.sample(logits.clone(), SamplingBatch.of(sequences, [3, 3, 3], V))
    expected = torch.log_softmax(logits, -1)
    assert sampled.token_ids[1:].tolist() == [9, 9]
    records = logprob_rows(*(each.numpy() for each in sampled.logprobs), 4)
    for record, row in zip(records, (0, 2), strict=True):
        token = int(sampled.token_ids[row])
        order = expected[row].argsort(descending=True).tolist()
        assert record["token_ids"].tolist() == [token, *order[:3]]
        assert record["rank"] == order.index(token) + 1
        assert np.allclose(record["logprobs"], expected[row][record["token_ids"]], atol=1e-6)


def test_a_row_that_has_sampled_nothing_is_not_decoded() -> None:
    """The relay table is poisoned when a row changes hands: the token of the sequence before it must not be read."""
    sequence, sampler = new_sequence(3), Sampler(5, CPU, EagerSampling())
    sequence.num_computed = len(PROMPT)
    plan = Plan(
        step=0, chunks=[Chunk(sequence, 3, 1, True)], num_decodes=1, rows=np.array([3]), positions=np.array([3]),
        kv_index=np.array([0]), started=[],
    )  # fmt: skip

    def stage() -> torch.Tensor:
        staged = StagedBatch(plan, torch.from_numpy, padded=1)
        table = torch.zeros((5, 9), dtype=torch.int32)
        return FreshInputs().stage(staged, sampler.relay, table, 4, 0).input_ids

    sampler.sample(torch.eye(V)[7:8].clone(), SamplingBatch.of([sequence], [3], V))
    assert stage().tolist() == [7]
    sampler.start(StartedRows.of([sequence]), V)
    with pytest.raises(AssertionError, match="decoded before its token was sampled"):
        stage()
