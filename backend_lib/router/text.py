"""The text of one sequence as the client reads it: decoded in pieces, ended by stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from backend_lib.router.detokenizer import Detokenizer
from backend_lib.router.stop_strings import StopMatcher

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TextDelta(NamedTuple):
    """What some tokens add: text to send, tokens that count, and whether a stop string has ended the sequence."""

    text: str
    num_tokens: int
    stopped: bool


class TextStream:
    """Turns a sequence's tokens into the text to send. One per sequence, used by one thread at a time.

    As in vLLM, a stop string counts if it ends in the text of a token after the first `min_tokens`. `prompt_ids` are
    what the tokens go on from.

    Args:
        include_stop: the text keeps the stop string that ends it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        *,
        prompt_ids: Sequence[int] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ):
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self._matcher = StopMatcher(stop, include_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens. Those after the one that completes a stop string are dropped and not counted."""
        before, pieces = self._num_tokens, []
        for token_id in token_ids:
            if self._stopped:
                break
            pieces.append(self._push_one(token_id))
        return TextDelta("".join(pieces), self._num_tokens - before, self._stopped)

    def finish(self) -> str:
        """The text still held back, once the sequence has ended. Empty if a stop string has ended it."""
        return "" if self._stopped else self._matcher.flush() + self._detokenizer.flush()

    def _push_one(self, token_id: int) -> str:
        self._num_tokens += 1
        may_match = self._num_tokens > self._min_tokens
        text, self._stopped = self._matcher.push(self._detokenizer.push((token_id,)), may_match)
        return text
