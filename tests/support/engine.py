"""A real router with a real worker process on the hash model, and what it must answer."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from backend_lib.config import Settings
from backend_lib.models.hash_model import _splitmix64_int
from backend_lib.request import FinishReason
from backend_lib.router.intake import Inbound
from backend_lib.router.reply import ErrorKind
from backend_lib.router.router import Router
from kernels.philox import gumbel_noise
from tests.support.checkpoints import FIRST_CHARACTER, hash_text, make_hash_checkpoint
from tests.support.senders import ListSender

VOCAB = 64
EOS = 2
PEAK = 10.0  # the hash model's logit of the next token; all others are 0


class Expected(NamedTuple):
    """The whole answer to a request that nobody disturbs."""

    text: str
    num_tokens: int
    finish: FinishReason


@dataclass
class Ask:
    """One request in plain values, its client, and what is expected of it."""

    prompt: list[int]
    parameters: dict[str, Any] = field(default_factory=dict)
    timeout_us: int = 0
    sender: ListSender = field(default_factory=ListSender)
    text: str | None = None  # sent instead of the prompt's ids

    def inbound(self) -> Inbound:
        text = hash_text(self.prompt) if self.text is None else self.text
        tensors = {"text_input": np.array([text.encode()], dtype=object)}
        return Inbound(tensors, {"temperature": 0, **self.parameters}, "", self.timeout_us, self.sender)

    def expected(self) -> Expected:
        names = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "stop", "temperature", "seed")
        return expected_answer(self.prompt, **{key: self.parameters[key] for key in names if key in self.parameters})

    def check(self, timeout: float = 30.0) -> None:
        """The answer has come and is the expected one, token by token."""
        sender = self.sender.wait(timeout)
        assert sender.error is None, sender.error
        echo = hash_text(self.prompt) if not self.parameters.get("stream") else ""
        expected = self.expected()
        got = Expected(sender.text.removeprefix(echo), sender.num_tokens, sender.finish)
        assert got == expected, f"{got} is not {expected} for {self.prompt} {self.parameters}"
        assert sender.text.startswith(echo)
        assert all(reply.num_input_tokens == len(self.prompt) for reply in sender.replies)
        self._check_pieces()

    def check_prefix(self, kind: ErrorKind, timeout: float = 30.0) -> None:
        """The answer ended with an error of this kind; what came before is the beginning of the expected one."""
        sender = self.sender.wait(timeout)
        assert sender.error is not None and sender.error[0] is kind, sender.error
        assert self.expected().text.startswith(sender.text)

    def _check_pieces(self) -> None:
        if not self.parameters.get("stream"):
            assert len(self.sender.replies) == 1
        interval = self.parameters.get("stream_interval", 1)
        for reply in self.sender.replies[:-1]:
            assert reply.text and reply.num_tokens >= interval and reply.finish is FinishReason.NONE


def expected_ids(
    prompt: list[int], num_tokens: int, *, temperature: float = 0, seed: int = 0, banned=None, sequence: int = 0
):
    """Token ids in order, without an end. `banned(n)`: ids that the nth token, from 1, must not be."""
    total = sum(_splitmix64_int((position << 32) + token) for position, token in enumerate(prompt))
    for number in range(1, num_tokens + 1):
        position = len(prompt) + number - 1
        peak = (_splitmix64_int(total & (1 << 64) - 1) >> 1) % VOCAB
        key = (seed, sequence, position)
        token = _choose(peak, banned(number) if banned else frozenset(), temperature, key)
        total += _splitmix64_int((position << 32) + token)
        yield token


def _choose(peak: int, banned: frozenset[int], temperature: float, key: tuple[int, int, int]) -> int:
    if temperature == 0:
        return peak if peak not in banned else min(set(range(VOCAB)) - banned)
    logits = torch.zeros(1, VOCAB)
    logits[0, peak] = PEAK
    logits[0, list(banned)] = -torch.inf
    seed, sequence, position = key
    words = (seed - (1 << 64) if seed >> 63 else seed, sequence, position)
    noise = gumbel_noise(*(torch.tensor([word]) for word in words), VOCAB)
    return int((logits / temperature + noise).argmax())


def expected_answer(
    prompt: list[int], *, max_tokens: int, min_tokens: int = 0, ignore_eos: bool = False, temperature: float = 0,
    stop_token_ids: list[int] | tuple[int, ...] = (), stop: list[str] | tuple[str, ...] = (), seed: int = 0,
) -> Expected:  # fmt: skip
    ends = frozenset(stop_token_ids) | (frozenset() if ignore_eos else {EOS})
    text = ""
    banned = lambda number: ends if number <= min_tokens else frozenset()  # noqa: E731
    for number, token in enumerate(
        expected_ids(prompt, max_tokens, temperature=temperature, seed=seed, banned=banned), start=1
    ):
        if token in ends:
            return Expected(
                text, number, FinishReason.EOS if token == EOS and not ignore_eos else FinishReason.STOP_TOKEN
            )
        text += "" if token == EOS else chr(FIRST_CHARACTER + token)
        found = [text.rindex(each) for each in stop if text.endswith(each) and token != EOS]
        if found and number > min_tokens:
            return Expected(text[: min(found)], number, FinishReason.STOP_STRING)
    return Expected(text, max_tokens, FinishReason.LENGTH)


def random_prompt(rng: random.Random, low: int = 1, high: int = 40) -> list[int]:
    return [rng.choice([token for token in range(VOCAB) if token != EOS]) for _ in range(rng.randint(low, high))]


@contextmanager
def running_router(folder: Path, is_serving=lambda: True, **settings: Any) -> Iterator[Router]:
    """A router with its worker; on leaving, both are gone and nothing may have been left behind."""
    if not (folder / "config.json").exists():
        make_hash_checkpoint(folder, vocab_size=VOCAB, eos_token_id=EOS, max_position=256)
    router = Router(Settings(model=str(folder), threads=1, **settings), is_serving=is_serving)
    try:
        yield router
    finally:
        router.close()
        assert pids_of(router) == []


def worker_pids() -> set[int]:
    """Workers started by this process."""
    return {child.pid for child in psutil.Process().children() if "backend_lib.worker" in _arguments(child)}


def pids_of(router: Router, *wanted: str) -> list[int]:
    """The router's workers, from the arena's descriptor in their arguments; those with these arguments as well, such as
    `--group=1`."""
    arguments = {f"--arena={router._arena.fd}", *wanted}
    return [child.pid for child in psutil.Process().children() if arguments <= set(_arguments(child))]


def worker_pid(router: Router, group: int = 0) -> int | None:
    """The worker of a group of one rank."""
    return next(iter(pids_of(router, f"--group={group}")), None)


def _arguments(process: psutil.Process) -> list[str]:
    """Empty once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def wait_until(condition, timeout: float = 15.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.001)


def assert_level(router: Router, timeout: float = 5.0) -> None:
    """Everything that requests took has come back: slots, extents, rows, KV, places in every list."""
    deadline = time.monotonic() + timeout
    while (left := _left(router)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"still held: {left}"


def _left(router: Router) -> dict[str, Any]:
    groups = router._groups.all
    loads = [router._arena.status(group.index, 0).load for group in groups]
    router._pool._reclaim()
    held = {
        "streams": len(router._streams),
        "slots": len(router._arena.slots) - len(router._pool._free),
        "heap": len(router._intake._extents._taken),
        "posted": sum(len(group._given) for group in groups),
        "queued": sum(len(group._waiting) for group in groups),
        "watched": len(router._watcher._streams),
        "marked": len(router._replies._marks),
        "running": sum(load.running for load in loads),
        "waiting": sum(load.waiting for load in loads),
        "kv": sum(load.kv_used for load in loads),
    }
    return {name: number for name, number in held.items() if number}
