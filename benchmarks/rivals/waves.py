"""What a wave of requests is, and its figures. All requests of a wave are sent at once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Prompt(NamedTuple):
    """The same prompt for engines that are given text and for those that are given ids."""

    text: str
    ids: list[int]


class Answer(NamedTuple):
    """When tokens came, in seconds since the wave began, and how many at each time."""

    times: list[float]
    tokens: list[int]

    @classmethod
    def one_by_one(cls, times: Sequence[float]) -> Answer:
        return cls(list(times), [1] * len(times))

    @property
    def inter_token(self) -> list[float]:
        """Seconds between tokens; tokens that came together share the gap before them."""
        gaps = zip(self.times, self.times[1:], self.tokens[1:], strict=False)
        return [(after - before) / count for before, after, count in gaps for _ in range(count)]


class WaveFigures(NamedTuple):
    tokens_per_s: float  # output tokens, over the time to the last one: prefill is in it
    ttft_ms: float  # p50 over requests
    inter_token_ms: float  # p50 over tokens


def figures(answers: Sequence[Answer], tokens: int) -> WaveFigures:
    """`tokens`: what each request asked for. Raises ValueError as `check` does."""
    check(answers, tokens)
    gaps = [gap for answer in answers for gap in answer.inter_token]
    return WaveFigures(
        tokens_per_s=tokens * len(answers) / max(answer.times[-1] for answer in answers),
        ttft_ms=1e3 * statistics.median(answer.times[0] for answer in answers),
        inter_token_ms=1e3 * statistics.median(gaps) if gaps else 0.0,
    )


def prefill_rate(prompt_tokens: int, answer: Answer) -> float:
    """Prompt tokens a second, of an answer of one token. Raises ValueError as `check` does."""
    check([answer], 1)
    return prompt_tokens / answer.times[0]


def check(answers: Sequence[Answer], tokens: int) -> None:
    """Raises ValueError when an answer holds another number of tokens, so that it can't be compared."""
    wrong = [sum(answer.tokens) for answer in answers if sum(answer.tokens) != tokens]
    if wrong:
        raise ValueError(f"{len(wrong)} of {len(answers)} answers hold {wrong[0]} tokens instead of {tokens}")
