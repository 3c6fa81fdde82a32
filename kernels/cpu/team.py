"""Threads that run a program together.

Operations follow each other; the items of one are claimed in small pieces, by whoever is free. So a thread that is kept
from its core holds up the others only while it has a piece, and joins again wherever they are then. Waits spin for some
microseconds, and sleep after that.

Words of the shared block, which the team owns as long as a thread of its lives. Each is in a cache line of its own and
written by atomic operations, but for the copies of program and step:

| word | written by | meaning |
| --- | --- | --- |
| generation | the caller of `run`, last | counts steps; a thread that sees a new one joins it |
| count | the caller, before the generation | operations |
| step, program | the caller, before the generation | what is run |
| waiting | any thread | how many sleep; whoever changes a word they may sleep on wakes them |
| stop | `close` | threads return |
| unclaimed | per operation: the caller (all), any thread (claim) | generation, high half; items left, low half |
| done | per operation: the caller (0), any thread | items that are finished |
| total | per operation: the caller | all items |

A step is over when all its items are done, so nothing of it is left to claim. A thread that comes late, with that
step's generation in mind, may read words of the next one in any state; but it can claim nothing, and so does nothing.
"""

from __future__ import annotations

import threading

import numpy as np

from kernels.cpu import sync
from kernels.cpu.compiled import jit
from kernels.cpu.ir import int64_array
from kernels.cpu.program import ATTEND, LINEAR, STEP_WORDS, WIDTH, count_items, run_items

_LINE = 64
_GENERATION, _COUNT, _WAITING, _STOP = (_LINE * place for place in range(4))
_TIMEOUT = _LINE * 4  # seconds and nanoseconds
_STEP = _LINE * 5
_CLAIMS = _STEP + 8 * STEP_WORDS
_UNCLAIMED, _DONE, _TOTAL = 0, 8, 16  # within an operation's line
_MAX_OPERATIONS = 8192
_PROGRAM = _CLAIMS + _LINE * _MAX_OPERATIONS
_BYTES = _PROGRAM + 8 * WIDTH * _MAX_OPERATIONS

_SPINS_IN_STEP = 3000  # some 100 microseconds: longer than a piece takes
_SPINS_BETWEEN = 600
# Nanoseconds in a step. A late thread may go to sleep on a word of the next step that nobody will change.
_LONGEST_SLEEP = 5_000_000
_PIECES = 4  # per thread and operation: fewer would leave threads waiting for the last


class Team:
    """`threads` threads: the caller of `run`, and daemons. One call at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._memory = np.zeros(_BYTES + _LINE, np.uint8)
        self._block = -(-self._memory.ctypes.data // _LINE) * _LINE
        _set_timeout(self._block)
        self._helpers = [self._start(place) for place in range(1, threads)]

    def _start(self, place: int) -> threading.Thread:
        thread = threading.Thread(target=_help, args=(self._memory, self._block, place, self.threads), daemon=True)
        thread.name = f"tandem-team-{place}"
        thread.start()
        return thread

    def run(self, operations: np.ndarray, step: np.ndarray) -> None:
        """Run int64 [operations, `WIDTH`] with int64 [`STEP_WORDS`]; returns when all of it is done."""
        assert len(operations) <= _MAX_OPERATIONS
        _take_part(self._block, operations, step, 0, self.threads)

    def close(self) -> None:
        """End the helpers. Not while a step runs."""
        _stop(self._block)
        for helper in self._helpers:
            helper.join()


@jit
def _set_timeout(block):
    sync.write(block + _TIMEOUT, 0)
    sync.write(block + _TIMEOUT + 8, _LONGEST_SLEEP)


def _help(memory: np.ndarray, block: int, thread: int, threads: int) -> None:
    """`memory` is held as long as the thread reads it."""
    nothing = np.zeros((0, WIDTH), np.int64), np.zeros(STEP_WORDS, np.int64)
    _take_part(block, *nothing, thread, threads)


@jit
def _take_part(block, operations, step, thread, threads):
    """Run a step, as thread 0; or help until the team is closed. One function, since it takes seconds to compile."""
    generation = _begin(block, operations, step) if thread == 0 else _next_generation(block, 0)
    while generation >= 0:
        _work(block, generation, thread, threads)
        if thread == 0:
            return
        generation = _next_generation(block, generation)


@jit
def _begin(block, operations, step):
    count = len(operations)
    int64_array(block + _STEP, 1, STEP_WORDS)[0] = step
    int64_array(block + _PROGRAM, count, WIDTH)[:] = operations
    generation = (sync.read(block + _GENERATION) + 1) & 0x7FFFFFFF
    sync.write(block + _COUNT, count)
    for place in range(count):
        claim = block + _CLAIMS + _LINE * place
        total = count_items(operations[place], step)
        sync.write(claim + _TOTAL, total)
        sync.write(claim + _DONE, 0)
        sync.write(claim + _UNCLAIMED, generation << 32 | total)
    sync.write(block + _GENERATION, generation)
    _wake(block, block + _GENERATION)
    return generation


@jit
def _work(block, generation, thread, threads):
    """Take part in a step until it is over, or another has begun."""
    operations = int64_array(block + _PROGRAM, _MAX_OPERATIONS, WIDTH)
    step = int64_array(block + _STEP, 1, STEP_WORDS)[0]
    for place in range(sync.read(block + _COUNT)):
        claim = block + _CLAIMS + _LINE * place
        op = operations[place]
        total = sync.read(claim + _TOTAL)
        piece = _piece(op, total, threads)
        while True:
            left, taken = _claim(claim, generation, piece)
            if taken == 0:
                break
            first = total - left
            run_items(op, step, first, first + taken, thread)
            if sync.add(claim + _DONE, taken) + taken == total:
                _wake(block, claim + _DONE)
        if not _is_done(block, claim + _DONE, generation, total):
            return


@jit
def _piece(op, total, threads):
    if op[0] == ATTEND:
        return 1  # some are many times as long as others
    if op[0] == LINEAR or total > 4 * threads:
        return max(1, total // (threads * _PIECES))
    return max(1, total // threads)


@jit
def _claim(claim, generation, piece):
    """How many items were left of an operation, and how many of those, the first, are now the caller's."""
    while True:
        word = sync.read(claim + _UNCLAIMED)
        left = word & 0xFFFFFFFF
        taken = min(piece, left)
        if word >> 32 != generation or taken == 0:
            return left, 0
        if sync.replace(claim + _UNCLAIMED, word, word - taken):
            return left, taken


@jit
def _is_done(block, address, generation, total):
    """Wait until an operation's items are finished; False if the step is over."""
    spins = 0
    while True:
        done = sync.read(address)
        if sync.read(block + _GENERATION) != generation:
            return False
        if done >= total:
            return True
        spins += 1
        if spins < _SPINS_IN_STEP:
            sync.pause()
        else:
            sync.add(block + _WAITING, 1)
            sync.sleep_while(address, done, block + _TIMEOUT)
            sync.add(block + _WAITING, -1)


@jit
def _next_generation(block, seen):
    """The step that begins next, or has; -1 when the team is closed."""
    spins = 0
    while True:
        if sync.read(block + _STOP):
            return -1
        generation = sync.read(block + _GENERATION)
        if generation != seen:
            return generation
        spins += 1
        if spins < _SPINS_BETWEEN:
            sync.pause()
        else:
            sync.add(block + _WAITING, 1)
            if not sync.read(block + _STOP):
                sync.sleep_while(block + _GENERATION, seen, 0)
            sync.add(block + _WAITING, -1)


@jit
def _wake(block, address):
    if sync.read(block + _WAITING) > 0:
        sync.wake(address)


@jit
def _stop(block):
    sync.write(block + _STOP, 1)
    sync.write(block + _GENERATION, sync.read(block + _GENERATION) + 1)
    sync.wake(block + _GENERATION)
