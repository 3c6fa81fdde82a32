"""When a process counts as hung: it owes something and nothing has changed for longer than the limit."""

from __future__ import annotations

import pytest

from backend_lib.router.hang import CHECKS, SLOWEST_CHECK, HangWatch

LIMIT = 10.0


class Bench:
    """A watch that is asked as a supervisor asks it, on a clock of its own."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.progress, self.is_owed, self.now = 0.0, True, 0.0
        self.watch = HangWatch(lambda: self.progress, lambda: self.is_owed, limit=limit, clock=lambda: self.now)

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


@pytest.mark.parametrize("name", ["progress", "is_owed"])
def test_who_goes_on_or_owes_nothing_is_not_hung(name: str) -> None:
    bench = Bench()
    for _ in range(4):
        assert not bench.pass_time(0.9 * LIMIT)
        bench.is_owed = True
        setattr(bench, name, bench.now if name == "progress" else False)
        bench.now += bench.watch.period
        assert not bench.watch.is_hung()


def test_who_owes_nothing_may_sleep() -> None:
    bench = Bench()
    bench.is_owed = False
    assert not bench.pass_time(100 * LIMIT)
    bench.is_owed = True
    assert not bench.pass_time(0.9 * LIMIT)


def test_time_in_which_the_router_was_frozen_too_does_not_count() -> None:
    bench = Bench()
    bench.pass_time(LIMIT / 2)
    bench.now += 1000 * LIMIT
    assert not bench.watch.is_hung() and not bench.pass_time(LIMIT / 4)


def test_how_often_to_look() -> None:
    assert Bench().watch.period == LIMIT / CHECKS
    assert Bench(limit=1000).watch.period == SLOWEST_CHECK
