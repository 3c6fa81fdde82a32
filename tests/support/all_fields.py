"""Random requests of every kind for played groups on the hash model, so that the answers of several ranks can be
compared with those of one: each answer is a function of its request alone, whatever else runs, pauses or is aborted."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from backend_lib.arena import CommandKind, SlotRef, logprob_row
from backend_lib.request import FinishReason
from tests.support.checkpoints import hash_text
from tests.support.engine import VOCAB
from tests.support.played import PlayedGroup
from tests.support.random_load import BEGINNINGS, MAX_LEN, MAX_TOKENS

WIDTH = 4  # tokens of a log-probability record at most
RECORD_BYTES = -(-(MAX_LEN + MAX_TOKENS) * logprob_row(WIDTH).itemsize // 64) * 64


@dataclass(frozen=True)
class Ask:
    """One sequence. `leader`: number of the ask whose sibling it is; `abort`: after so many of its tokens."""

    prompt: list[int]
    max_tokens: int
    fields: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    leader: int | None = None
    abort: int | None = None


class Answer(NamedTuple):
    """`records`: log-probabilities of output and prompt, but for the ids of tokens beside the chosen ones: most of the
    hash model's logits are equal, and which of equals stand there depends on what else is in the step."""

    ids: list[int]
    finish: FinishReason
    error: bytes
    records: list[tuple]

    def begins(self, whole: Answer) -> bool:
        """Whether this is that, cut off by an abort."""
        return self.finish is FinishReason.CANCELLED and self.ids == whole.ids[: len(self.ids)]


def random_asks(seed: int, count: int, *, aborts: float = 0.15) -> list[Ask]:
    rng = random.Random(seed)
    asks: list[Ask] = []
    while len(asks) < count:
        prompt = rng.choice(BEGINNINGS)[: rng.randint(1, 16)] + [rng.randint(5, 60) for _ in range(rng.randint(0, 8))]
        max_tokens = rng.choice([1, 2, 8, MAX_TOKENS])
        fields, params = _fields(rng, max_tokens), _params(rng)
        leader, siblings = len(asks), rng.choice([1, 1, 1, 3])
        for index in range(siblings):
            abort = rng.choice([0, 0, 1, 5]) if rng.random() < aborts else None
            own = fields | {"sequence_index": index}
            asks.append(Ask(prompt, max_tokens, own, params, leader if index else None, abort))
    return asks


def undisturbed(asks: list[Ask]) -> list[Ask]:
    return [replace(ask, abort=None) for ask in asks]


def answers(group: PlayedGroup, asks: list[Ask], timeout: float = 120) -> list[Answer]:
    """Of each, when all have been released."""
    return _Play(group, asks).run(timeout)


class _Play:
    def __init__(self, group: PlayedGroup, asks: list[Ask]) -> None:
        self.group, self.asks = group, asks
        self._free = list(range(group.arena.spec.num_slots))
        self._live: dict[int, SlotRef] = {}
        self._refs: dict[int, SlotRef] = {}
        self._retired: list[tuple[int, int]] = []  # slot and last command
        self._last: dict[int, int] = {}  # command
        self._aborted: set[int] = set()
        self._answers: dict[int, Answer] = {}

    def run(self, timeout: float) -> list[Answer]:
        waiting = list(range(len(self.asks)))
        deadline = time.monotonic() + timeout
        while waiting or self._live:
            self._look()
            while waiting and self._free:
                self._admit(waiting.pop(0))
            assert time.monotonic() < deadline, f"still there: {[self.asks[each] for each in self._live]}"
            self.group.replies.wait(0.01)
            self.group.assert_alive()
        return [self._answers[number] for number in range(len(self.asks))]

    def _admit(self, number: int) -> None:
        ask, slot = self.asks[number], self._free.pop()
        params, fields = dict(ask.params), dict(ask.fields)
        if ask.leader is not None:
            fields["leader_slot"], params["leader_generation"] = self._refs[ask.leader]
        at = slot * self.group.slot_bytes + self.group.records_at
        if "logprob_width" in fields:
            fields["logprob_offset"] = at
        if "prompt_logprob_width" in fields:
            fields["prompt_logprob_offset"] = at + MAX_TOKENS * logprob_row(WIDTH).itemsize
        ref = self.group.admit(slot, ask.prompt, ask.max_tokens, params=params, **fields)
        self._live[number] = self._refs[number] = ref
        self._last[number] = self.group.ring.head
        self._abort_when_due(number)

    def _look(self) -> None:
        for number, ref in list(self._live.items()):
            published = self.group.published(ref)
            if published and published.released:
                self._answers[number] = self._answer(ref)
                del self._live[number]
                self._retired.append((ref.slot, self._last[number]))
            else:
                self._abort_when_due(number)
        passed = [each for each in self._retired if self.group.ring.passed_by_all(each[1])]
        self._retired = [each for each in self._retired if each not in passed]
        self._free += [slot for slot, _ in passed]

    def _abort_when_due(self, number: int) -> None:
        due, ref = self.asks[number].abort, self._live[number]
        if due is None or number in self._aborted or len(self.group.output(ref)) < due:
            return
        self._aborted.add(number)
        self._last[number] = self.group.post(CommandKind.ABORT, ref)

    def _answer(self, ref: SlotRef) -> Answer:
        slots, published = self.group.arena.slots, self.group.published(ref)
        assert published
        told, of_prompt = slots.logprobs(ref.slot), slots.prompt_logprobs(ref.slot)
        count = published.output_len
        records = [*_compared(told, range(count)), *_compared(of_prompt, range(1, MAX_LEN) if count else range(0))]
        return Answer(self.group.output(ref), published.finish, bytes(slots.headers["error"][ref.slot]), records)


def _compared(records: np.ndarray | None, places: range) -> list[tuple]:
    if records is None:
        return []
    chosen = records[places.start : places.stop]
    return [(int(each["rank"]), int(each["token_ids"][0]), *each["logprobs"].tolist()) for each in chosen]


def _fields(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"ignore_eos": rng.randint(0, 1), "adapter_id": rng.choice([0, 0, 0, 1, 2])}
    if rng.random() < 0.3:
        fields |= {"temperature": rng.choice([0.5, 1.0, 5.0]), "seed": rng.getrandbits(64)}
        fields |= rng.choice([{}, {"top_k": 3}, {"top_p": 0.5}])
    if rng.random() < 0.2:
        fields["min_tokens"] = rng.randint(1, max_tokens)
    if rng.random() < 0.2:
        fields["logprob_width"] = rng.randint(1, WIDTH)
    if rng.random() < 0.2:
        fields["prompt_logprob_width"] = rng.randint(1, WIDTH)
    return fields


def _params(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {}
    if rng.random() < 0.2:
        params["stop_token_ids"] = rng.sample(range(5, VOCAB), 6)
    if rng.random() < 0.2:
        params["prefix_cache"] = False
    if rng.random() < 0.1:
        params["min_p"] = 0.1
    if rng.random() < 0.2:
        params |= rng.choice(RULES)
    if rng.random() < 0.25:
        kind, source = rng.choice(GRAMMARS)
        params["grammar"] = {"kind": kind, "source": source}
    return params


RULES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    {"frequency_penalty": 11.0},
    {"logit_bias": [[7, 20.0], [8, -5.0]]},
    {"bad_words": [[9], [10, 11], [30]]},
    {"allowed_token_ids": [5, 6, 7, 8]},
    {"allowed_token_ids": [5]},
]
_A, _B, _C = (hash_text([number]) for number in (9, 10, 11))
GRAMMARS: list[tuple[str, str]] = [
    ("choice", json.dumps([hash_text([9, 10, 11]), hash_text([20, 21, 22, 23, 24]), _A])),
    ("regex", f"({_A}|{_B}){{2,6}}{_C}?"),
    ("regex", f"[{hash_text([5])}-{hash_text([60])}]*"),
    ("ebnf", "root ::= missing"),
    ("ebnf", f'root ::= "{_A}" root | "{_B}"'),
    ("ebnf", f'root ::= "{_A}"'),
    ("regex", "(unclosed"),
    ("choice", json.dumps(["no such letters"])),
    ("json_object", ""),
]
