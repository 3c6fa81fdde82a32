"""Requests whose token ids are kept, and when their tokens came."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backend_lib.request import FinishReason
from backend_lib.router.intake import Inbound
from backend_lib.router.reply import Reply
from backend_lib.router.router import Router
from benchmarks.serving.workload import WORDS_FILE, Lengths, Workload
from tests.support.engine import wait_until
from tests.support.senders import ListSender

PROMPT_TOKENS, OUTPUT_TOKENS = Lengths(8, 96), Lengths(64, 200)
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # in turn


@dataclass(frozen=True)
class Question:
    """One streaming request in plain values. Its draw is over the whole vocabulary, and its length is fixed."""

    text: str
    max_tokens: int
    temperature: float
    seed: int

    def inbound(self, sender: ListSender) -> Inbound:
        parameters: dict[str, Any] = {
            "max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed,
            "top_k": 0, "top_p": 1.0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        return Inbound({"text_input": np.array([self.text.encode()], dtype=object)}, parameters, "", 0, sender)


def make_questions(count: int, seed: int) -> list[Question]:
    """The same for the same seed: prompts of common words, half of them greedy, half drawn."""
    words = WORDS_FILE.read_text().split()
    workload = Workload(input_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS, words=words, seed=seed)
    rng = random.Random(seed)
    questions = []
    for number in range(count):
        text, sampling = workload.request("kills", number)
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        questions.append(Question(text, sampling["max_tokens"], temperature, rng.getrandbits(63)))
    return questions


class TimedSender(ListSender):
    """Keeps when each response came and how many tokens there were with it."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[float, int]] = []  # time.monotonic(), tokens so far
        super().__init__(self._on_reply)

    def _on_reply(self, reply: Reply) -> None:
        before = self.arrivals[-1][1] if self.arrivals else 0
        self.arrivals.append((time.monotonic(), before + reply.num_tokens))

    def when_beyond(self, num_tokens: int) -> float | None:
        """When the client first had more tokens than this."""
        return next((when for when, tokens in self.arrivals if tokens > num_tokens), None)


@dataclass
class Running:
    """A question under way, in its slot of the arena."""

    question: Question
    slot: int
    generation: int
    sender: TimedSender = field(default_factory=TimedSender)


class Round:
    """Questions asked at the same time. No other may be asked of the router before `token_ids`: it would take slots."""

    def __init__(self, router: Router, questions: Sequence[Question]) -> None:
        self._router = router
        senders = [TimedSender() for _ in questions]
        for question, sender in zip(questions, senders, strict=True):
            router.submit(question.inbound(sender))
        self.running: list[Running] = []
        for question, sender in zip(questions, senders, strict=True):
            wait_until(lambda sender=sender: self._find(sender) is not None)
            stream = self._find(sender)
            assert stream is not None
            self.running.append(Running(question, stream.slot, stream.generation, sender))

    def _find(self, sender: TimedSender) -> Any:
        return next((each for each in list(self._router._streams.values()) if each.sender is sender), None)

    @property
    def is_over(self) -> bool:
        return all(each.sender.done.is_set() for each in self.running)

    def published(self) -> dict[int, int]:
        """Tokens that the worker has published, by place in `running`, of those that have not ended."""
        numbers = {}
        for place, each in enumerate(self.running):
            published = self._router._arena.slots.published(each.slot, each.generation)
            assert published is not None
            if published.finish is FinishReason.NONE and not each.sender.done.is_set():
                numbers[place] = published.output_len
        return numbers

    def token_ids(self) -> list[tuple[list[int], list[int]]]:
        """Prompt and output ids of each, once the round is over: its slots are not another's before the next round."""
        slots = self._router._arena.slots
        ids = []
        for each in self.running:
            published = slots.published(each.slot, each.generation)
            assert published is not None
            output = slots.output_ids(each.slot)[: published.output_len]
            ids.append((slots.prompt_ids(each.slot).tolist(), output.tolist()))
        return ids
