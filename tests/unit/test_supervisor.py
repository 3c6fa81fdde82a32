"""A group of several ranks lives and ends together. The ranks are real processes that do what a test orders."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from backend_lib.arena import Doorbell, WorkerState
from backend_lib.request import FinishReason, GenerationRequest
from backend_lib.router import worker_process
from backend_lib.router.group import Group
from backend_lib.router.seats import Seat
from backend_lib.router.stream import Stream
from backend_lib.router.supervisor import Supervisor
from backend_lib.router.workers import End
from tests.support.arena import close, new_arena
from tests.support.processes import has_ended
from tests.support.rank import TOLD
from tests.support.senders import ListSender

TIMEOUT = 20
READY = "ready 100"
LOST = "fail LostGroup: gone;exit 3"


class Rig:
    """A supervised group of two ranks. `ups` and `downs` say what the supervisor said."""

    def __init__(self, hang_seconds: float) -> None:
        self.arena = new_arena(num_groups=1, num_ranks=2, num_slots=8, ring_records=64, heap_bytes=1 << 16)
        self.group = Group(self.arena, 0, replies=Doorbell(), max_running=4, on_released=lambda stream: None)
        self.ups: queue.Queue[list[WorkerState]] = queue.Queue()
        self.downs: queue.Queue[End] = queue.Queue()
        self.all_pids: set[int] = set()
        self.alive_at_down: list[list[psutil.Process]] = []
        self.supervisor = Supervisor(
            self.arena, self.group, seats=[Seat(), Seat()], hang_seconds=hang_seconds,
            on_up=self._came_up, on_down=self._went_down,
        )  # fmt: skip
        self.supervisor.start()

    def ranks(self) -> list[psutil.Process]:
        """In the order of ranks."""
        mine = [child for child in psutil.Process().children() if f"--arena={self.arena.fd}" in child.cmdline()]
        return sorted(mine, key=lambda child: next(each for each in child.cmdline() if each.startswith("--rank=")))

    def wait_up(self) -> list[WorkerState]:
        return self.ups.get(timeout=TIMEOUT)

    def wait_down(self) -> End:
        return self.downs.get(timeout=TIMEOUT)

    def tell(self) -> None:
        """What `told` waits for; ranks of later epochs find it said."""
        self.arena.slots.set_client_finish(TOLD, FinishReason.CANCELLED)

    def _came_up(self) -> None:
        self.group.came_up()
        self.processes = self.ranks()
        self.ups.put([self.arena.status(0, rank).state for rank in range(2)])

    def _went_down(self, end: End) -> None:
        self.alive_at_down.append([each for each in self.processes if not has_ended(each)])
        self.group.went_down(is_blamed=not end.from_outside)
        self.downs.put(end)


@pytest.fixture
def rig(monkeypatch):
    @contextmanager
    def make(orders: dict[str, str], *, hang_seconds: float = 60) -> Iterator[Rig]:
        monkeypatch.setattr(worker_process, "WORKER", "tests.support.rank")
        monkeypatch.setenv("RANKS", json.dumps(orders))
        rig = Rig(hang_seconds)
        try:
            yield rig
        finally:
            rig.supervisor.close()
            assert not rig.ranks()
            close(rig.arena)

    return make


def test_a_group_is_up_when_all_its_ranks_are_ready(rig) -> None:
    with rig({"0.0": READY, "0.1": "sleep 0.4;ready 90"}) as group:
        assert group.wait_up() == [WorkerState.READY] * 2
        assert group.supervisor.first_load.result(TIMEOUT) == 100, "rank 0's, which is the least of all"


def test_a_rank_that_lost_its_group_is_not_the_cause_of_the_end(rig) -> None:
    """Though it is seen to end first. Then the rest is killed, and all begin again."""
    first = {"0.0": f"{READY};told;{LOST}", "0.1": f"{READY};follow 0;sleep 0.05;signal SIGSEGV"}
    with rig(first | {"1.0": READY, "1.1": READY}) as group:
        group.wait_up()
        pid = group.processes[1].pid
        group.tell()
        assert group.wait_down() == End(f"worker {pid}, rank 1 was killed by SIGSEGV", from_outside=False)
        group.wait_up()
        assert group.alive_at_down == [[]] and group.arena.epoch(0) == 1
        assert group.supervisor.failed_starts == 0


def test_a_rank_that_was_killed_from_outside_is_the_cause_of_any_other_end(rig) -> None:
    """No rank's end can have sent that signal, while a rank whose collective fails may crash in many ways."""
    crash = f"{READY};told;fail the collective failed;exit 6"
    with rig({"0.0": crash, "0.1": f"{READY};follow 0;sleep 0.05;signal SIGKILL", "1.0": READY, "1.1": READY}) as group:
        group.wait_up()
        first = group.processes
        group.tell()
        assert group.wait_down() == End(f"worker {first[1].pid}, rank 1 was killed by SIGKILL", from_outside=True)


def test_where_all_have_only_lost_their_group_the_first_is_named(rig) -> None:
    with rig({"0.0": f"{READY};told;{LOST}", "0.1": READY, "1.0": READY, "1.1": READY}) as group:
        group.wait_up()
        lost, other = group.processes
        group.tell()
        end = group.wait_down()
        assert end.words == f"worker {lost.pid}, rank 0 ended with status 3: LostGroup: gone"
        assert not end.from_outside and has_ended(other)


def test_a_rank_that_is_killed_takes_the_others_along(rig) -> None:
    with rig({"0.0": READY, "0.1": READY, "1.0": READY, "1.1": READY}) as group:
        group.wait_up()
        first = group.processes
        os.kill(first[1].pid, signal.SIGKILL)
        assert group.wait_down().from_outside
        group.wait_up()
        assert group.alive_at_down == [[]] and not {each.pid for each in first} & {each.pid for each in group.processes}


def test_a_rank_that_cannot_load_fails_the_first_load_in_its_own_words(rig) -> None:
    """The others may wait for it for ever, or find that it has gone."""
    for others in ("sleep 100", f"told;{LOST}"):
        waits = "told" if others == "sleep 100" else "follow 0;sleep 0.05"
        orders = {"0.0": others, "0.1": f"{waits};fail ValueError: no room for a KV cache;exit 1"}
        with rig(orders) as group:
            while {group.arena.status(0, rank).state for rank in range(2)} != {WorkerState.LOADING}:
                time.sleep(0.01)
            group.tell()
            with pytest.raises(RuntimeError, match=r"^worker \d+, rank 1 ended with status 1: ValueError: no room for"):
                group.supervisor.first_load.result(TIMEOUT)
            group.supervisor.close()
            assert group.ranks() == [] and group.downs.empty()


def test_a_group_loads_as_long_as_any_rank_does_something(rig) -> None:
    started = time.monotonic()
    with rig({"0.0": "sleep 100", "0.1": "compute 1.2;sleep 100"}, hang_seconds=0.6) as group:
        with pytest.raises(RuntimeError, match=r"^workers \d+, \d+ made no progress for .* s and are ended$"):
            group.supervisor.first_load.result(TIMEOUT)
        assert time.monotonic() - started > 1.2 + 0.6


def test_a_group_hangs_in_which_nobody_does_more_than_wait_for_another(rig) -> None:
    """Collectives wake up now and then while they wait."""
    orders = {"0.0": READY, "0.1": READY, "1.0": "trickle 0.006", "1.1": "sleep 100", "2.0": READY, "2.1": READY}
    with rig(orders, hang_seconds=3) as group:
        group.wait_up()
        group.processes[0].kill()
        group.wait_down()
        assert "made no progress" in group.wait_down().words


def test_a_group_that_hangs_is_ended_as_a_whole(rig) -> None:
    with rig({"0.0": READY, "0.1": READY, "1.0": READY, "1.1": READY}, hang_seconds=0.5) as group:
        group.wait_up()
        pids = [each.pid for each in group.processes]
        stream = Stream(GenerationRequest(request_id="", text=""), ListSender(), 0, 7)
        group.arena.slots.write(0, {"generation": 7})
        group.group.submit(stream)
        end = group.wait_down()
        assert end.words.startswith(f"workers {pids[0]}, {pids[1]} made no progress for 0.")
        assert not end.from_outside
        group.wait_up()
        assert group.alive_at_down == [[]]
