"""The draw's noise: Philox against its published vectors, its layout against plain integers, its distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.philox import gumbel_noise, gumbel_noise_at, philox

# counter, key, words: Random123's known answers for philox4x32-10
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

word32 = st.integers(0, 2**32 - 1)


def _tensors(words):
    return tuple(torch.tensor([word]) for word in words)


def _plain_philox(counter, key):
    """Philox4x32-10 on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & 0xFFFFFFFF,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def _plain_noise(seed, sequence, position, token_id):
    counter = (token_id // 4, position & 0xFFFFFFFF, sequence, position >> 32)
    word = _plain_philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))[token_id % 4]
    return -math.log(-math.log((word + 0.5) / 2**32))


def _rows(*rows):
    """(seed, sequence, position) of each row as three tensors."""
    seed, sequence, position = zip(*rows, strict=True)
    return torch.tensor(seed), torch.tensor(sequence), torch.tensor(position)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_published_vectors(counter, key, expected):
    counter, key, expected = ([int(word, 16) for word in words.split()] for words in (counter, key, expected))
    assert [int(word) for word in philox(_tensors(counter), _tensors(key))] == expected


@given(st.tuples(word32, word32, word32, word32), st.tuples(word32, word32))
@settings(max_examples=100, deadline=None)
def test_words_equal_plain_integers(counter, key):
    assert tuple(int(word) for word in philox(_tensors(counter), _tensors(key))) == _plain_philox(counter, key)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**40), st.integers(0, 262143))
@settings(max_examples=100, deadline=None)
def test_layout_of_key_and_counter(seed, sequence, position, token_id):
    noise = gumbel_noise_at(*_rows((seed, sequence, position)), torch.tensor([[token_id]]))
    assert noise.item() == pytest.approx(_plain_noise(seed, sequence, position, token_id), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 4, 5, 101, 4096, 49152])
def test_some_ids_equal_the_whole_row_bit_for_bit(vocab_size):
    rows = _rows((1, 0, 5), (-7, 3, 2**33), (2**63 - 1, 1, 0))
    noise = gumbel_noise(*rows, vocab_size)
    assert noise.shape == (3, vocab_size)
    assert noise.dtype == torch.float32
    ids = torch.randint(vocab_size, (3, 37))
    assert torch.equal(gumbel_noise_at(*rows, ids), noise.gather(1, ids))


def test_a_row_does_not_depend_on_its_batch():
    rows = [(11, 0, 4), (12, 0, 4), (11, 1, 4), (11, 0, 5)]
    noise = gumbel_noise(*_rows(*rows), 1000)
    for index, row in enumerate(rows):
        assert torch.equal(gumbel_noise(*_rows(row), 1000)[0], noise[index])
    assert len({tuple(row.tolist()) for row in noise}) == len(rows)


def test_out_is_written_and_sequence_may_be_int32():
    seed, sequence, position = _rows((1, 2, 3))
    out = torch.empty(1, 99)
    assert gumbel_noise(seed, sequence.int(), position, 99, out=out) is out
    assert torch.equal(out, gumbel_noise(seed, sequence, position, 99))


def test_extreme_words_give_finite_noise():
    from kernels.philox import _gumbel

    noise = _gumbel(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1])).float()
    assert torch.isfinite(noise).all()
    assert (noise.diff() > 0).all()


def test_draws_follow_the_softmax():
    """Chi-square of 20,000 draws over 20 tokens, by position and by seed: 19 degrees of freedom, p about 1e-4."""
    draws, vocab_size = 20_000, 20
    logits = torch.linspace(-2, 2, vocab_size)
    expected = logits.softmax(0) * draws
    count = torch.arange(draws)
    ids = torch.arange(vocab_size).expand(draws, -1)
    for seed, position in ((torch.full((draws,), 5), count), (count * 977, torch.full((draws,), 5))):
        noise = gumbel_noise_at(seed, torch.zeros(draws, dtype=torch.int64), position, ids)
        observed = torch.bincount((logits + noise).argmax(1), minlength=vocab_size)
        assert ((observed - expected) ** 2 / expected).sum() < 51


def test_moments_of_the_noise():
    """Mean is Euler's constant and variance pi^2 / 6, over 400,000 values."""
    noise = gumbel_noise(*_rows(*[(seed, 0, 0) for seed in range(8)]), 50_000).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
