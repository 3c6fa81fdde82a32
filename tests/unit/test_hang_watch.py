"""When a worker counts as hung: it owes something and nothing has changed for longer than the limit."""

from __future__ import annotations

import pytest

from backend_lib.arena import Load
from backend_lib.router.hang import CHECKS, SLOWEST_CHECK, STEPS, HangWatch

LIMIT = 10.0
IDLE = Load(*[0] * len(Load._fields))


class FakeGroup:
    owed = True
    progress = 0


class FakeStatus:
    load = IDLE
    predicted_step = 0.0


class Bench:
    """A watch that is asked as a supervisor asks it, on a clock of its own."""

    def __init__(self, predicted_step: float = 0.0) -> None:
        self.group, self.status, self.now = FakeGroup(), FakeStatus(), 0.0
        self.status.predicted_step = predicted_step
        self.watch = HangWatch(self.group, self.status, at_least=LIMIT, clock=lambda: self.now)

    def pass_time(self, seconds: float) -> bool:
        """Whether it was found hung meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.watch.period
            if self.watch.is_hung():
                return True
        return False


def test_nothing_changes_for_longer_than_the_limit() -> None:
    bench = Bench()
    assert not bench.pass_time(LIMIT) and bench.pass_time(1)
    assert bench.watch.stuck == pytest.approx(LIMIT, abs=2 * bench.watch.period)


@pytest.mark.parametrize(
    "change",
    [
        lambda bench: setattr(bench.group, "progress", bench.now),
        lambda bench: setattr(bench.status, "load", IDLE._replace(kv_used=int(bench.now * 1000))),
        lambda bench: setattr(bench.group, "owed", False),
    ],
)
def test_what_counts_as_progress(change) -> None:
    bench = Bench()
    for _ in range(4):
        assert not bench.pass_time(0.9 * LIMIT)
        bench.group.owed = True
        change(bench)
        bench.now += bench.watch.period
        assert not bench.watch.is_hung()


def test_steps_that_lead_nowhere_are_no_progress() -> None:
    bench = Bench()
    for step in range(1000):
        bench.status.load = IDLE._replace(step=step)
        if bench.pass_time(bench.watch.period):
            break
    assert bench.now < 2 * LIMIT


def test_who_owes_nothing_may_sleep() -> None:
    bench = Bench()
    bench.group.owed = False
    assert not bench.pass_time(100 * LIMIT)
    bench.group.owed = True
    assert not bench.pass_time(0.9 * LIMIT)


def test_time_in_which_the_router_was_frozen_too_does_not_count() -> None:
    bench = Bench()
    bench.pass_time(LIMIT / 2)
    bench.now += 1000 * LIMIT
    assert not bench.watch.is_hung() and not bench.pass_time(LIMIT / 4)


def test_long_steps_are_given_time() -> None:
    bench = Bench(predicted_step=LIMIT)
    assert bench.watch.limit == STEPS * LIMIT and bench.watch.period == SLOWEST_CHECK
    assert not bench.pass_time(0.9 * STEPS * LIMIT)
    assert Bench(predicted_step=LIMIT / STEPS / 2).watch.limit == LIMIT
    assert Bench().watch.period == LIMIT / CHECKS
