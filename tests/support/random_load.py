"""Random commands for a played group on the hash model: admissions that share prefixes, aborts at any stage, and more
than the KV cache holds, so that sequences pause."""

from __future__ import annotations

import random
from typing import NamedTuple

from backend_lib.arena import CommandKind, Published, SlotRef
from backend_lib.request import FinishReason
from tests.support.engine import expected_ids
from tests.support.played import PlayedGroup

MAX_PROMPT, MAX_TOKENS = 24, 32
MAX_LEN = MAX_PROMPT + MAX_TOKENS
BEGINNINGS = [[5 + (7 * line + place) % 50 for place in range(16)] for line in range(4)]


class Live(NamedTuple):
    ref: SlotRef
    prompt: list[int]
    max_tokens: int
    draw: dict[str, float]


class RandomLoad:
    def __init__(self, group: PlayedGroup, seed: int, *, draws: float = 0.02, aborts: float = 0.3) -> None:
        self.group = group
        self.num_commands = 0
        self.num_aborted = 0
        self.num_whole = 0
        self._rng = random.Random(seed)
        self._draws, self._aborts = draws, aborts
        self._free = list(range(group.arena.spec.num_slots))
        self._retired: list[tuple[int, int]] = []  # slot and last command
        self._live: dict[SlotRef, Live] = {}
        self._last: dict[SlotRef, int] = {}  # command

    def run(self, num_commands: int) -> None:
        """Post so many, then wait until all has been released; every token that came must be the right one."""
        target = self.num_commands + num_commands
        while self.num_commands < target or self._live:
            self._drain()
            if self.num_commands < target and self._free:
                self._admit()
                if self._rng.random() < self._aborts:
                    self._abort()
            else:
                self.group.replies.wait(0.02)
                self.group.assert_alive()

    def _admit(self) -> None:
        rng, slot = self._rng, self._free.pop()
        prompt = rng.choice(BEGINNINGS)[: rng.randint(1, 16)] + [rng.randint(5, 60) for _ in range(rng.randint(0, 8))]
        max_tokens = rng.choice([1, 2, 8, MAX_TOKENS])
        draw = {"temperature": 1.0, "seed": rng.getrandbits(64)} if rng.random() < self._draws else {}
        ref = self.group.admit(slot, prompt, max_tokens, **draw)
        self._live[ref], self._last[ref] = Live(ref, prompt, max_tokens, draw), self.group.ring.head
        self.num_commands += 1

    def _abort(self) -> None:
        ref = self._rng.choice(list(self._live))
        self._last[ref] = self.group.post(CommandKind.ABORT, ref)
        self.num_commands += 1

    def _drain(self) -> None:
        touched = self.group.dirty.drain()
        for ref in dict.fromkeys(list(self._live) if touched is None else touched):
            published = self.group.published(ref)
            if ref in self._live and published and published.released:
                self._check(self._live.pop(ref), published)
                self._retired.append((ref.slot, self._last.pop(ref)))
        passed = [slot for slot, last in self._retired if self.group.ring.passed_by_all(last)]
        self._retired = [each for each in self._retired if each[0] not in passed]
        self._free += passed

    def _check(self, live: Live, published: Published) -> None:
        is_cut = published.finish is FinishReason.CANCELLED
        got = self.group.output(live.ref)
        assert published.finish is FinishReason.LENGTH or is_cut, published
        assert is_cut or len(got) == live.max_tokens
        assert got == list(expected_ids(live.prompt, len(got), **live.draw)), live
        self.num_aborted += is_cut
        self.num_whole += not is_cut
