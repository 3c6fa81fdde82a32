"""Threads that share the work of programs: nothing is done twice or left out, and nobody is waited for in vain."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kernels.cpu import operations, program, sync, team
from kernels.cpu.rows import SILU
from kernels.cpu.team import Team
from tests.support.kernels import known_weights, packed_weights, room_for_rows

ROOT = Path(__file__).parents[2]
MOST_TOKENS = 13
LAYERS = 20  # enough that helpers wake up before it is over
BUSY = "print(flush=True)\nwhile True: pass"


@contextmanager
def busy_neighbour(core: int | None = None) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield
    finally:
        process.kill()
        process.communicate()


class Programs:
    """Two programs that work in the same buffers, one a part of the other, and steps of several sizes.

    They add to what they have written, so that an item left out, done twice or done too early shows in `hidden`.
    """

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.embedding, self.up, self.down = (
            packed_weights(known_weights(generator, outputs, groups, 4).values, 4)
            for outputs, groups in ((50, 2), (192, 2), (64, 3))
        )
        self.norm = generator.standard_normal(64).astype(np.float32)
        self.hidden, self.wide = np.zeros((MOST_TOKENS, 64), np.float32), np.zeros((MOST_TOKENS, 192), np.float32)
        self.rounded, self.active = room_for_rows(MOST_TOKENS, 2), room_for_rows(MOST_TOKENS, 3)
        rows = self._rows()
        self.tables = operations.table(rows), operations.table(rows[:4])
        self.ids = generator.integers(0, 50, (8, MOST_TOKENS))
        sizes = [1, 13, 2, 0, 7, 13, 1, 5]
        self.steps = [self._step(ids, size) for ids, size in zip(self.ids, sizes, strict=True)]

    def _rows(self) -> list[list[int]]:
        codes, scales = self.rounded.codes, self.rounded.scales
        layer = [
            operations.norm(self.hidden, self.norm, 1e-5, codes, scales),
            operations.linear(self.up, codes, scales, self.wide),
            operations.activate(SILU, self.wide, 96, self.active.codes, self.active.scales),
            operations.linear(self.down, self.active.codes, self.active.scales, self.hidden, adds=True),
            operations.add_norm(self.wide, self.norm, 1e-5, self.hidden),
        ]
        first, last = operations.embed(self.embedding, 1.0, self.hidden), operations.soft_cap(self.hidden, 5.0)
        return [first, *layer * LAYERS, last]

    def _step(self, ids: np.ndarray, tokens: int) -> np.ndarray:
        step = np.zeros(program.STEP_WORDS, np.int64)
        step[program.TOKENS], step[program.LOGITS], step[program.IDS] = tokens, tokens // 2, ids.ctypes.data
        return step

    def result(self, one: Team, table: int, step: int) -> bytes:
        one.run(self.tables[table], self.steps[step])
        return self.hidden[: self.steps[step][program.TOKENS]].tobytes()

    def expected(self) -> dict[tuple[int, int], bytes]:
        alone = Team(1)
        return {each: self.result(alone, *each) for each in itertools.product(range(2), range(len(self.steps)))}


def check_many(one: Team, count: int) -> None:
    """Right results, `count` times, of programs drawn at random."""
    programs = Programs()
    expected = programs.expected()
    generator = np.random.default_rng(1)
    for table, step in zip(
        generator.integers(0, 2, count).tolist(), generator.integers(0, 8, count).tolist(), strict=True
    ):
        assert programs.result(one, table, step) == expected[table, step]


@contextmanager
def closed(one: Team) -> Iterator[Team]:
    try:
        yield one
    finally:
        one.close()


def test_results_tell_mistakes() -> None:
    """What an item done twice, or not at all, would give."""
    programs = Programs()
    expected = programs.expected()
    assert len(set(expected.values())) == 15  # of 16: both programs make nothing of the step without tokens
    before = programs.result(Team(1), 0, 1)
    for place in (4, 5, 5 * LAYERS - 1, 5 * LAYERS):  # they add
        for table in (np.insert(programs.tables[0], place, programs.tables[0][place], axis=0),
                      np.delete(programs.tables[0], place, axis=0)):  # fmt: skip
            changed = Programs()
            changed.tables = table, changed.tables[1]
            assert changed.result(Team(1), 0, 1) != before


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_many_programs_beside_a_busy_neighbour(threads: int) -> None:
    with busy_neighbour(), closed(Team(threads)) as one:
        check_many(one, 10_000)


@pytest.mark.long
@pytest.mark.parametrize("threads", [2, 3, 4, 8])
def test_very_many_programs_beside_busy_neighbours(threads: int) -> None:
    with busy_neighbour(), busy_neighbour(), closed(Team(threads)) as one:
        check_many(one, 200_000)


def test_a_thread_that_is_kept_from_its_core() -> None:
    """It shares the last core with two that never rest, at a low priority: what it has not taken goes on without it."""
    allowed = os.sched_getaffinity(0)
    with closed(Team(2)) as one, busy_neighbour(max(allowed)), busy_neighbour(max(allowed)):
        helper = one._helpers[0].native_id
        os.sched_setaffinity(helper, {max(allowed)})
        os.setpriority(os.PRIO_PROCESS, helper, 10)
        check_many(one, 300)


def test_threads_that_share_one_core() -> None:
    """They are stopped in the midst of pieces, and the others sleep until these are done."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # of this thread, and so of those that it starts
    try:
        with busy_neighbour(), closed(Team(3)) as one:
            check_many(one, 3000)
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_team_that_rests_uses_no_processor_and_wakes_again() -> None:
    with closed(Team(4)) as one:
        for _ in range(5):
            check_many(one, 10)
            time.sleep(0.02)
            before = time.process_time()
            time.sleep(0.1)
            assert time.process_time() - before < 0.02


def test_close_ends_the_threads() -> None:
    before = threading.enumerate()
    rested, at_once, unused = Team(3), Team(3), Team(3)
    for each in (rested, at_once):
        check_many(each, 20)
    time.sleep(0.05)
    check_many(at_once, 1)
    for each in (rested, at_once, unused):
        each.close()
        assert not any(helper.is_alive() for helper in each._helpers)
    assert set(threading.enumerate()) <= set(before)


def test_two_teams_at_once() -> None:
    with closed(Team(2)) as one, closed(Team(3)) as other, ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(check_many, each, 500) for each in (one, other)]:
            done.result()
        check_many(one, 20)


def test_memory_lives_as_long_as_a_thread_reads_it() -> None:
    one = Team(2)
    check_many(one, 5)
    memory, block, helper = weakref.ref(one._memory), one._block, one._helpers[0]
    del one
    gc.collect()
    assert helper.is_alive() and memory() is not None
    team._stop(block)
    helper.join(10)
    assert not helper.is_alive()
    del helper
    gc.collect()
    assert memory() is None


ENDINGS = {
    "returns": ("", 0),
    "returns while they sleep": ("time.sleep(0.1)", 0),
    "raises": ("raise RuntimeError('enough')", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_process_ends_with_its_main_thread(ending: str) -> None:
    statement, code = ENDINGS[ending]
    script = (
        "import time\nfrom tests.kernels.test_cpu_team import Team, check_many\n"
        f"one = Team(3)\ncheck_many(one, 20)\nprint(time.monotonic(), flush=True)\n{statement}"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - float(done.stdout) < 5
    assert done.returncode == code, done.stderr
    assert ("enough" in done.stderr) == (ending == "raises")


def test_one_that_comes_late_finds_nothing_to_do() -> None:
    """The step is over, and the next is written down, with more tokens and another program, but has not begun."""
    alone, programs = Team(1), Programs()
    programs.result(alone, 0, 0)
    generation = 1
    programs.hidden[:] = 7.0
    programs.steps[0][program.TOKENS] = MOST_TOKENS
    programs.tables[0][:] = 0  # the caller may have freed it
    for helpers in (1, 2, 4):
        team._work(alone._block, generation, 0, helpers)
    assert (programs.hidden == 7.0).all()


def test_only_the_generation_that_runs_can_claim() -> None:
    word = np.array([7 << 32 | 5, 0, 0, 0], np.int64)
    address = word.ctypes.data - team._UNCLAIMED
    for stale in (6, 8, 0):
        assert team._claim(address, stale, 2)[1] == 0
    assert word[0] == 7 << 32 | 5
    assert [team._claim(address, 7, 2) for _ in range(4)] == [(5, 2), (3, 2), (1, 1), (0, 0)]
    assert word[0] == 7 << 32


def words_of(one: Team, offset: int) -> np.ndarray:
    start = one._block - one._memory.ctypes.data + offset
    return one._memory[start : start + 64].view(np.int64)


def test_who_waits_for_the_last_items_is_woken() -> None:
    """One of two items is done, and the other is not taken yet, when a thread goes to sleep until both are."""
    alone, x, out = Team(1), np.ones((2, 32), np.float32), room_for_rows(2, 1)
    step = np.zeros(program.STEP_WORDS, np.int64)
    step[program.TOKENS] = 2
    alone.run(operations.table([operations.quantise(x, 1, out.codes, out.scales)]), step)
    claim = words_of(alone, team._CLAIMS)
    claim[team._DONE // 8], claim[team._UNCLAIMED // 8] = 1, 1 << 32 | 1
    words_of(alone, team._TIMEOUT)[0] = 100  # seconds
    out.codes[:] = 0
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(team._is_done, alone._block, alone._block + team._CLAIMS + team._DONE, 1, 2)
        while words_of(alone, team._WAITING)[0] == 0:
            time.sleep(0.01)
        time.sleep(0.05)
        team._work(alone._block, 1, 0, 1)
        try:
            assert waits.result(5)
        finally:
            sync.wake(alone._block + team._CLAIMS + team._DONE)
    assert out.codes[:, 0].tolist() == [0, 127]  # the last is what was left


def test_who_waits_for_the_next_step_is_woken() -> None:
    alone, programs = Team(1), Programs()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(team._next_generation, alone._block, 0)
        while words_of(alone, team._WAITING)[0] == 0:
            time.sleep(0.01)
        time.sleep(0.05)
        programs.result(alone, 0, 0)
        try:
            assert waits.result(5) == 1
        finally:
            sync.wake(alone._block + team._GENERATION)


@pytest.mark.parametrize("threads", [2, 5])
def test_every_item_is_claimed_once(threads: int) -> None:
    word = np.array([3 << 32 | 10_000, 0, 0, 0], np.int64)

    def claim_all() -> list[int]:
        mine = []
        while True:
            left, taken = team._claim(word.ctypes.data - team._UNCLAIMED, 3, 3)
            if taken == 0:
                return mine
            mine += range(10_000 - left, 10_000 - left + taken)

    with ThreadPoolExecutor(threads) as pool:
        claimed = [pool.submit(claim_all) for _ in range(threads)]
    assert sorted(item for each in claimed for item in each.result()) == list(range(10_000))


def test_a_program_that_is_too_long() -> None:
    table = np.zeros((team._MAX_OPERATIONS + 1, program.WIDTH), np.int64)
    with pytest.raises(AssertionError):
        Team(1).run(table, np.zeros(program.STEP_WORDS, np.int64))
