"""What responses say of single tokens: their ids and log-probabilities, in the shapes that vllm_backend gives them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from backend_lib.request import OutputOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NONE = "null"

# JSON has no infinity; this is what vLLM says in its place.
_LEAST_LOGPROB = -9999.0

_CACHED_TEXTS = 1 << 16

TokenText = Callable[[int], str]


class TokenNews(NamedTuple):
    """What a response says of the tokens since the last one. `chosen` are their own log-probabilities; `logprobs` is
    JSON, as is `prompt_logprobs`, which the first response has; `cumulative_logprob` is of all tokens so far.
    """

    token_ids: tuple[int, ...] = ()
    chosen: tuple[float, ...] = ()
    logprobs: str = NONE
    cumulative_logprob: float = 0.0
    prompt_logprobs: str = NONE


def token_text(tokenizer: Tokenizer) -> TokenText:
    """The text of one token alone, special ones included."""

    @functools.lru_cache(maxsize=_CACHED_TEXTS)
    def text(token_id: int) -> str:
        decoded: str = tokenizer.decode([token_id], skip_special_tokens=False)
        return decoded

    return text


class TokenOutputs:
    """Gathers what one sequence's next response says of tokens. Used by one thread at a time."""

    def __init__(self, output: OutputOptions, text: TokenText) -> None:
        self._output = output
        self._text = text
        self._ids: list[int] = []
        self._rows: list[str] = []
        self._chosen: list[float] = []
        self._cumulative = 0.0
        self._prompt = NONE

    def add_prompt(self, rows: np.ndarray | None) -> None:
        """The prompt's rows, of which the first token has none."""
        if rows is not None:
            self._prompt = _json([NONE, *(self._row(row) for row in rows[1:])])

    def add(self, token_ids: list[int], rows: np.ndarray | None) -> None:
        """Tokens that count, and their rows if the worker was asked for them."""
        if self._output.output_ids:
            self._ids += token_ids
        if rows is None:
            return
        rows = rows[: len(token_ids)]
        chosen = [max(_LEAST_LOGPROB, each) for each in rows["logprobs"][:, 0].tolist()]
        self._cumulative += sum(chosen)
        if self._output.logprobs:
            self._chosen += chosen
            self._rows += map(self._row, rows)

    def take(self) -> TokenNews:
        """Once: the next response has what is added from now on."""
        news = TokenNews(
            token_ids=tuple(self._ids),
            chosen=tuple(self._chosen),
            logprobs=_json(self._rows) if self._rows else NONE,
            cumulative_logprob=self._cumulative,
            prompt_logprobs=self._prompt,
        )
        self._ids, self._rows, self._chosen, self._prompt = [], [], [], NONE
        return news

    def _row(self, row: np.void) -> str:
        """{token id: what is known of it}, the chosen token first. Those after it are in the order of their rank."""
        ranks = [int(row["rank"]), *range(1, len(row["token_ids"]))]
        entries: dict[int, Any] = {}
        for token_id, logprob, rank in zip(row["token_ids"].tolist(), row["logprobs"].tolist(), ranks, strict=True):
            entry = {"logprob": max(_LEAST_LOGPROB, logprob), "rank": rank, "decoded_token": self._text(token_id)}
            entries.setdefault(token_id, entry)
        return json.dumps(entries)


def _json(rows: Iterable[str]) -> str:
    """Of rows that are JSON already: all of them in one call would keep Python's other threads waiting."""
    return f"[{', '.join(rows)}]"
