"""Where one sequence stands in its grammar."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backend_lib.worker.grammar.mask import token_ids_of

# What following a grammar may take of the loop's time, and so of every other sequence's: so much, and so much a token.
_SECONDS, _SECONDS_PER_TOKEN = 0.25, 0.004
_clock = time.thread_time


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar for one vocabulary. Sequences share it; none changes it.

    `handle` is xgrammar's. `stops`: int32 [W], the mask of the stop tokens alone. `num_bytes`: memory it takes.
    """

    handle: Any
    stops: np.ndarray
    vocab_size: int
    num_bytes: int


class GrammarState:
    """Follows a sequence's output, token by token, and knows what may come next.

    `output_ids` are tokens published already: a sequence resumed with them stands where an undisturbed one would.
    """

    def __init__(self, compiled: CompiledGrammar, output_ids: Iterable[int] = ()) -> None:
        """Raises ValueError when the grammar does not allow `output_ids`, or takes too long to follow them."""
        from xgrammar import GrammarMatcher

        self._compiled = compiled
        self._matcher = GrammarMatcher(compiled.handle, override_stop_tokens=token_ids_of(compiled.stops) or None)
        self._mask = np.empty((1, len(compiled.stops)), dtype=np.int32)
        self._is_filled = False
        self._seconds, self._num_accepted = 0.0, 0
        self._last_word = _last_word(compiled.vocab_size)
        for token_id in output_ids:
            if not self.accept(int(token_id)):
                raise ValueError(f"the grammar does not allow the output's token {token_id}")
            if self.is_too_slow:
                raise ValueError("the grammar takes too long to follow")

    def accept(self, token_id: int) -> bool:
        """Take the next token. False, and nothing is changed, when the grammar does not allow it."""
        if self._matcher.is_terminated() or not 0 <= token_id < self._compiled.vocab_size:
            return False  # what xgrammar would write to stderr about
        began = _clock()
        accepted = self._matcher.accept_token(token_id)
        self._seconds += _clock() - began
        self._num_accepted += accepted
        self._is_filled = self._is_filled and not accepted
        return accepted

    def fill(self, row: np.ndarray | torch.Tensor) -> None:
        """Write the mask of the next token into int32 [W], bit i % 32 of word i // 32 for token i; W covers the logits.

        Stop tokens are allowed exactly where the output may end.
        """
        np.copyto(np.asarray(row), self._next()[0])

    @property
    def is_over(self) -> bool:
        """The output matches as a whole, and nothing can follow but a stop token, which need not be sampled."""
        return self._may_end and not np.any(self._next()[0] & ~self._compiled.stops)

    @property
    def is_stuck(self) -> bool:
        """The output does not match yet, and this vocabulary has no token that could lead there."""
        return not self._may_end and not self._next().any()

    @property
    def is_too_slow(self) -> bool:
        """It has cost the loop, and so every other sequence, more than any grammar should.

        An ambiguous grammar has more readings with each token: `root ::= root root | "a"` takes 70 ms after 400.
        """
        return self._seconds > _SECONDS + _SECONDS_PER_TOKEN * self._num_accepted

    @property
    def _may_end(self) -> bool:
        return self._matcher.is_terminated() or self._matcher.is_completed()

    def _next(self) -> np.ndarray:
        """int32 [1, W]. Filled once a token: whoever asks `is_over` fills the mask of the next step."""
        if not self._is_filled:
            if self._matcher.is_terminated():
                self._mask[0] = self._compiled.stops
            else:
                began = _clock()
                self._matcher.fill_next_token_bitmask(self._mask)
                self._seconds += _clock() - began
                self._mask[0, -1] &= self._last_word
            self._is_filled = True
        return self._mask


def _last_word(vocab_size: int) -> np.int32:
    """The bits of tokens that there are; xgrammar sets those behind them too."""
    used = vocab_size % 32
    return np.int32((1 << used) - 1) if used else np.int32(-1)
