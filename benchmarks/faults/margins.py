"""Whether two answers to one request are the same, but for a choice that rounding may turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backend_lib.models import Decoder
from benchmarks.faults.requests import Question
from kernels.philox import gumbel_noise
from tests.support.forward import ForwardDriver

BOUND = 1e-3  # activations and KV cache are float32


@dataclass(frozen=True)
class Difference:
    """The first token in which an answer is not the undisturbed one. `margin`: how far the worse of the two tokens is
    below the best score; below `BOUND` the order in which floats were added may have decided.
    """

    request: int
    position: int  # in the output, from 0
    expected: int | None
    got: int | None
    margin: float

    @property
    def is_wrong(self) -> bool:
        return not self.margin < BOUND


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Where two outputs part; the shorter one's length when it is the other's beginning."""
    if list(expected) == list(got):
        return None
    pairs = zip(expected, got, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(got)))


def compare(
    decoder: Decoder, request: int, question: Question, prompt: Sequence[int], expected: Sequence[int],
    got: Sequence[int],
) -> Difference | None:  # fmt: skip
    """None when both are the same. An answer that is too short or too long is wrong by any margin."""
    at = first_difference(expected, got)
    if at is None:
        return None
    if at >= min(len(expected), len(got)):
        ends = [ids[at] if at < len(ids) else None for ids in (expected, got)]
        return Difference(request, at, ends[0], ends[1], float("inf"))
    scores = next_scores(decoder, question, [*prompt, *expected[:at]])
    worse = min(scores[expected[at]], scores[got[at]])
    return Difference(request, at, expected[at], got[at], float(scores.max() - worse))


@torch.inference_mode()
def next_scores(decoder: Decoder, question: Question, ids: Sequence[int]) -> torch.Tensor:
    """float32 [V]: what the sampler takes the largest of after `ids`, from the model's own forward."""
    driver = ForwardDriver(decoder, rows=1, max_len=len(ids))
    logits = driver.step({driver.add(ids): len(ids)})[0][-1]
    if question.temperature == 0:
        return logits
    key = (torch.tensor([word]) for word in (question.seed, 0, len(ids)))
    return logits / question.temperature + gumbel_noise(*key, len(logits))[0]
