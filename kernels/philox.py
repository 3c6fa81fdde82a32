"""The noise of a draw: Gumbel noise from Philox4x32-10, a pure function of (seed, sequence, position, token id).

Adding it to the logits and taking the largest draws from their softmax (the Gumbel-max trick), whatever else is in the
batch. Philox is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

L rows · V vocabulary · K token ids of a row · B = ceil(V / 4) Philox blocks of a row
"""

from __future__ import annotations

import torch

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Philox4x32-10: four random 32-bit words for each counter and key.

    All tensors are int64 with values in [0, 2^32) and broadcast against each other. The result has their joint shape.
    """
    shape = torch.broadcast_shapes(*(word.shape for word in (*counter, *key)))
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(_ROUNDS):
        # Products wrap modulo 2^64, which leaves both halves right. Only the factors c0 and c2 must be clean above
        # 32 bits, so the low halves are not masked until the end.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        round_0, round_1 = (k0 + number * _WEYL_0) & _MASK, (k1 + number * _WEYL_1) & _MASK
        c0, c1 = _mix(product_1, c1, round_0), product_1
        c2, c3 = _mix(product_0, c3, round_1), product_0
    c0, c1, c2, c3 = (word.expand(shape) for word in (c0, c1 & _MASK, c2, c3 & _MASK))
    return c0, c1, c2, c3


def _mix(product: torch.Tensor, word: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The product's high half, xor the word, xor the key."""
    mixed = (product >> 32) ^ word
    mixed ^= key
    mixed &= _MASK
    return mixed


def gumbel_noise(
    seed: torch.Tensor, sequence: torch.Tensor, position: torch.Tensor, vocab_size: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Noise for the whole vocabulary of each row.

    Args:
        seed: int64 [L], any 64 bits: the Philox key.
        sequence: int32 or int64 [L], at least 0: which of a request's sequences.
        position: int64 [L], at least 0: place of the drawn token in its sequence.
        out: float32 [L, V], contiguous; written and returned if given.

    Returns:
        float32 [L, V], finite.
    """
    blocks = (vocab_size + 3) // 4
    if out is None:
        out = torch.empty(len(seed), vocab_size, device=seed.device)
    block = torch.arange(blocks, device=seed.device)
    padded = torch.empty(blocks, 4, device=seed.device)
    for row in range(len(seed)):  # a row's words fit the L2 cache, all rows' would not
        here = slice(row, row + 1)
        for lane, word in enumerate(_words(seed[here], sequence[here], position[here], block)):
            padded[:, lane] = _gumbel(word)
        out[row] = padded.view(-1)[:vocab_size]
    return out


def gumbel_noise_at(
    seed: torch.Tensor, sequence: torch.Tensor, position: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """`gumbel_noise` at some token ids only, bit for bit: int64 [L, K] → float32 [L, K]."""
    words = _words(seed[:, None], sequence[:, None], position[:, None], token_ids // 4)
    word = torch.stack(words, -1).gather(-1, (token_ids % 4)[..., None])
    return _gumbel(word[..., 0]).float()


def _words(seed: torch.Tensor, sequence: torch.Tensor, position: torch.Tensor, block: torch.Tensor) -> Words:
    """The four words of a block of four token ids. Each argument is int, of shapes that broadcast to `block`'s."""
    counter = (block, position & _MASK, sequence.long() & _MASK, (position >> 32) & _MASK)
    return philox(counter, (seed & _MASK, (seed >> 32) & _MASK))


def _gumbel(word: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)) in float64 for u = (word + 1/2) / 2^32.

    u needs 33 bits: float64 holds it exactly and so inside (0, 1), float32 would round some words to 1. Rounded to
    float32 afterwards, the noise does not depend on whose logarithm was used, but for one value in some 10^8.
    """
    noise = word.double().add_(0.5).mul_(2.0**-32)
    return noise.log_().neg_().log_().neg_()
