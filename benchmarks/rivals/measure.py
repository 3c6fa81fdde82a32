"""The run: engines in turn, round after round, with the machine's rates before and after each."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.rivals.peer import Peer, Setup
from benchmarks.rivals.prompts import Prompts
from benchmarks.rivals.reference import Rates, measure_rates
from benchmarks.rivals.results import Round, best_rate, is_slow
from benchmarks.rivals.sessions import Deadline, EngineError, Session
from benchmarks.rivals.waves import figures, prefill_rate

_WARM_UP_TOKENS = 8
_STEADY_TRIES, _STEADY_SECONDS = 20, 10.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What every engine is asked."""

    concurrency: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    repeats: int
    retries: int  # of rounds in slow phases
    seed: int
    timeout: float  # seconds, of one start of an engine with all that is asked then


class Run:
    def __init__(
        self, plan: Plan, setup: Setup, prompts: Prompts, rates: Callable[[int], Rates] = measure_rates,
        known_rate: float = 0.0,
    ) -> None:  # fmt: skip
        """`known_rate`: fp32 GFLOP/s that this machine has reached in earlier runs."""
        self._known_rate = known_rate
        self._plan, self._setup, self._prompts, self._rates = plan, setup, prompts, rates
        self._last: Rates | None = None  # measured after a round, and so before the next
        self.rounds: dict[str, list[Round]] = {}

    def run(self, peers: Sequence[Peer]) -> None:
        """Each engine once a round, so that all of them see the same drift; one that failed is not tried again."""
        self.rounds = {peer.name: [] for peer in peers}
        for number in range(self._plan.repeats):
            for peer in peers:
                repeats = self._repeats(peer, number)
                if repeats:
                    self._add(peer, number, repeats)
        for retry in range(self._plan.retries):
            self._retry(peers, (retry + 1) * self._plan.repeats)

    def _retry(self, peers: Sequence[Peer], first: int) -> None:
        """Rounds in place of those that fell in a slow phase, while there are too few others."""
        for peer in peers:
            rounds = self.rounds[peer.name]
            wanted = 1 if peer.slow_start else self._plan.repeats
            steady = sum(not is_slow(each, self.best_rate) for each in rounds)
            for number in range(first, first + wanted - steady):
                if not any(each.error for each in rounds):
                    self._wait_steady()
                    self._add(peer, number, self._plan.repeats if peer.slow_start else 1)

    def _wait_steady(self) -> None:
        """Until the machine is as fast as it was at its best, within limits."""
        for _ in range(_STEADY_TRIES):
            self._last = self._rates(self._setup.threads)
            if not is_slow(Round(before=self._last), self.best_rate):
                return
            time.sleep(_STEADY_SECONDS)

    @property
    def best_rate(self) -> float:
        """fp32 GFLOP/s, in this run or an earlier one."""
        return max(self._known_rate, best_rate(each for rounds in self.rounds.values() for each in rounds))

    def _repeats(self, peer: Peer, number: int) -> int:
        """How often everything is measured in that round."""
        if any(each.error for each in self.rounds[peer.name]):
            return 0
        if peer.slow_start:
            return self._plan.repeats if number == 0 else 0
        return 1

    def _add(self, peer: Peer, number: int, repeats: int) -> None:
        print(f"round {number + 1}: {peer.name} …", file=sys.stderr, flush=True)
        each = Round(before=self._last or self._rates(self._setup.threads))
        self.rounds[peer.name].append(each)
        try:
            self._measure(peer, each, f"{self._plan.seed}/{number}", repeats)
        # An engine is somebody else's code: whatever it does, the others are still measured.
        except Exception as error:
            each.error = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
            print(f"{peer.name}: {each.error}", file=sys.stderr, flush=True)
        self._last = each.after = self._rates(self._setup.threads)

    def _measure(self, peer: Peer, each: Round, label: str, repeats: int) -> None:
        if peer.family and not self._setup.home.stamp(peer.family).exists():
            raise EngineError(f"not installed; --install {peer.family}")
        deadline = Deadline(self._plan.timeout)
        with contextlib.ExitStack() as stack:
            started = time.perf_counter()
            session = stack.enter_context(peer.open(self._setup, deadline))
            each.ready_seconds = time.perf_counter() - started
            each.command, each.versions = session.command, session.versions
            self._waves(session, each, label, repeats)
            each.memory = session.memory()
            if peer.open_long is None:
                self._prefill(session, each, label, repeats)
                each.memory = each.memory._replace(peak=session.memory().peak)
                return
        with peer.open_long(self._setup, deadline) as session:
            self._prefill(session, each, label, repeats)

    def _waves(self, session: Session, each: Round, label: str, repeats: int) -> None:
        plan = self._plan
        for count in plan.concurrency:
            session.wave(self._prompts.make(f"{label}/warm/{count}", count, plan.prompt_tokens), _WARM_UP_TOKENS)
        for number in range(repeats):
            for count in plan.concurrency:
                prompts = self._prompts.make(f"{label}/{number}/{count}", count, plan.prompt_tokens)
                found = figures(session.wave(prompts, plan.output_tokens), plan.output_tokens)
                each.waves.setdefault(count, []).append(found)

    def _prefill(self, session: Session, each: Round, label: str, repeats: int) -> None:
        length = self._setup.long_tokens
        for number in range(-1, repeats):  # the first is a warm-up
            (answer,) = session.wave(self._prompts.make(f"{label}/long/{number}", 1, length), 1)
            if number >= 0:
                each.prefill.append(prefill_rate(length, answer))
