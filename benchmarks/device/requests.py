"""Requests as the router writes them into an arena."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from backend_lib.arena import Arena, CommandKind
from benchmarks.device.scale import Scale
from benchmarks.slots import request_bytes, write_request


class Placed(NamedTuple):
    slot: int
    generation: int
    max_tokens: int


class Requests:
    """Fills slots from the first on, each with an extent of its own."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._ring = arena.ring(0)
        self._generation = 0
        self.clear()

    def clear(self) -> None:
        """Begin again at slot 0: all requests are over."""
        self._slot = self._offset = 0

    def place(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Placed:
        self._generation += 1
        slot, at = self._slot, self._offset
        self._slot, self._offset = slot + 1, at + request_bytes(len(prompt), max_tokens)
        assert self._slot <= len(self._arena.slots) and self._offset <= self._arena.spec.heap_bytes
        write_request(
            self._arena.slots, slot, self._generation, at, prompt, max_tokens, params={"prefix_cache": False}, **fields
        )
        return Placed(slot, self._generation, max_tokens)

    def post(self, placed: Placed) -> None:
        self._ring.post(CommandKind.ADMIT, placed.slot, placed.generation)

    def is_over(self, placed: Placed) -> bool:
        published = self._arena.slots.published(placed.slot, placed.generation)
        return published is not None and published.released

    def output(self, placed: Placed) -> list[int]:
        published = self._arena.slots.published(placed.slot, placed.generation)
        assert published is not None
        return self._arena.slots.output_ids(placed.slot)[: published.output_len].tolist()


def run_until_over(
    engine: Any, requests: Requests, placed: list[Placed], check: Callable[[], None] = lambda: None
) -> None:
    """Turn the engine's loop. What it says to the router is left in the dirty list, for whoever reads it."""
    left = list(placed)
    while left:
        check()
        engine.loop.run_once()
        while left and requests.is_over(left[-1]):
            left.pop()


def chat_lengths(scale: Scale, *, seed: int = 0) -> list[tuple[int, int]]:
    """Tokens in and out, lognormal as in ShareGPT's conversations: most are short, some are several times the mean."""
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, min(round(mean * rng.lognormvariate(-0.5, 1.0)), 8 * mean))

    return [(length(scale.lengths[0]), length(scale.lengths[1])) for _ in range(scale.requests)]
