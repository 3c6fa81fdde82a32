"""What `benchmarks/quality.py` computes: distances between logits, windows of the text, rounded layers."""

import hashlib
import math

import numpy as np
import pytest
import torch

from backend_lib.models.quantised import QuantisedLinear
from benchmarks.formats.comparators import COMPARATORS, RoundedLinear, round_by_group, round_by_row, round_weight_
from benchmarks.formats.divergence import Tally
from benchmarks.quality import TEXT, WINDOW, spread, windows

VOCABULARY = 50
POSITIONS = 300  # more than are taken at a time


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def softmax(logits: torch.Tensor) -> np.ndarray:
    powers = np.exp(logits.double().numpy())
    return powers / powers.sum(1, keepdims=True)


def test_measures_are_what_their_formulas_say() -> None:
    reference, following = random(POSITIONS, VOCABULARY), torch.arange(POSITIONS) % VOCABULARY
    logits = reference + 0.1 * random(POSITIONS, VOCABULARY, seed=1)
    tally = Tally()
    for part in range(0, POSITIONS, 200):
        tally.add(*(each[part : part + 200] for each in (logits, reference, following)))
    quality = tally.quality()
    p, q = softmax(reference), softmax(logits)
    came = np.arange(POSITIONS), following.numpy()
    assert quality.tokens == POSITIONS
    assert quality.perplexity == pytest.approx(math.exp(-np.log(q[came]).mean()), rel=1e-5)
    assert quality.perplexity_rise == pytest.approx(math.exp(np.log(p[came] / q[came]).mean()) - 1, abs=1e-6)
    assert quality.rise_error == pytest.approx(np.log(p[came] / q[came]).std() / POSITIONS**0.5, rel=1e-4)
    assert quality.divergence == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-3)
    assert quality.same_argmax == pytest.approx((p.argmax(1) == q.argmax(1)).mean())
    differences = (logits - reference).abs().numpy()
    assert quality.mean_difference == pytest.approx(differences.mean(), rel=1e-5)
    assert quality.p99_difference == pytest.approx(np.percentile(differences, 99), rel=0.15)  # from a sample


def test_equal_logits_are_no_distance_apart() -> None:
    tally, logits = Tally(), torch.zeros(POSITIONS, VOCABULARY)
    tally.add(logits, logits.clone(), torch.zeros(POSITIONS, dtype=torch.int64))
    quality = tally.quality()
    assert quality.perplexity == pytest.approx(VOCABULARY)
    assert quality[2:] == (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("prefix", [[], [-1]])
@pytest.mark.parametrize("length", [2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 3 * WINDOW - 1])
def test_windows_cover_the_text_once(length: int, prefix: list[int]) -> None:
    ids = list(range(length))
    cut = list(windows(ids, prefix))
    assert all(len(each) == WINDOW for each in cut[:-1])
    assert 2 <= len(cut[-1]) <= WINDOW
    assert all(each[: len(prefix)] == prefix for each in cut)
    covered = [token for each in cut for token in each[len(prefix) :]]
    assert covered == ids[: len(covered)]
    # Without a prefix, a token alone predicts nothing and is not predicted.
    assert length - len(covered) == (1 if length == WINDOW + 1 and not prefix else 0)


def test_part_of_a_text_is_taken_from_all_of_it() -> None:
    cut = [[place] * WINDOW for place in range(53)]
    assert spread(cut, None) == cut
    assert [each[0] for each in spread(cut, 4 * WINDOW - 1)] == [0, 13, 26, 39]
    assert spread(cut, 10**6) == cut


def test_the_text_is_the_one_that_the_page_has_figures_of() -> None:
    digest = hashlib.sha256(TEXT.read_bytes()).hexdigest()
    assert digest == "ae18e77a2d66f2d74df2a8530210656bedc32ab903703dfc886d89a040c87f3a"


def test_rounding_of_rows() -> None:
    x = torch.tensor([[127.0, 0.4, -0.6, 63.5], [0.0, 0.0, 0.0, 0.0], [-1.27, 0.014, 0.016, 1.0]])
    expected = torch.tensor([[127.0, 0.0, -1.0, 64.0], [0.0, 0.0, 0.0, 0.0], [-1.27, 0.01, 0.02, 1.0]])
    assert torch.allclose(round_by_row(x), expected)


def test_rounding_by_groups_spares_the_others_of_a_row_an_outlier() -> None:
    x = torch.ones(1, 64) * 0.3
    x[0, 0] = 1000.0
    assert torch.allclose(round_by_group(x)[0, 32:], x[0, 32:])
    assert torch.equal(round_by_row(x)[0, 32:], torch.zeros(32))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_imitation_of_a_format_computes_what_the_format_does(bits: int) -> None:
    weight, bias, x = random(70, 96) * 0.1, random(70, seed=1), random(5, 96, seed=2)
    real = QuantisedLinear(weight.clone(), bias, bits)(x)
    round_weight_(weight, bits)
    assert torch.allclose(RoundedLinear(weight, bias, round_by_group)(x), real, atol=2e-5)


@pytest.mark.parametrize("name", COMPARATORS)
def test_comparators_are_near_the_exact_product(name: str) -> None:
    weight, bias, x = random(70, 96) * 0.1, random(70, seed=1), random(5, 96, seed=2)
    x[1] *= 1000
    exact = x @ weight.T + bias
    linear = COMPARATORS[name](weight.clone(), bias, "fp32")
    wrong = (linear(x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert 1e-4 < float(wrong.max()) < (0.12 if "int4" in name else 0.03)
    # fbgemm has one range for all rows, whatever they are divided by: a row's result changes with its neighbours.
    assert torch.allclose(linear(x[:1]), linear(x)[:1], atol=1e-6) is (name != "fbgemm-int8")
