"""Threads that run a program together.

Operations follow each other; the items of one are claimed in small pieces, by whoever is free. So a thread that is kept
from its core holds up the others only while it has a piece, and joins again wherever they are then. Waits spin for some
microseconds, and sleep after that.

Words of the shared block, each in a cache line of its own, written by atomic operations:

| word | written by | meaning |
| --- | --- | --- |
| generation | the caller of `run`, last | counts steps; a thread that sees a new one joins it |
| program, count, step | the caller, before the generation | addresses of operations and step, how many |
| waiting | any thread | how many sleep; whoever changes a word they may sleep on wakes them |
| stop | `close` | threads return |
| claimed | per operation: the caller (reset), any thread (claim) | generation in the high half, next item in the low |
| done | per operation: the caller (reset), any thread | items that are finished |

A claim names its generation, so a thread that comes late, with an old one in mind, can take nothing and leaves. `done`
is reset only between steps, when all that was claimed is finished.
"""

from __future__ import annotations

import threading

import numpy as np

from kernels.cpu import sync
from kernels.cpu.compiled import jit
from kernels.cpu.ir import int64_array
from kernels.cpu.program import LINEAR, STEP_WORDS, WIDTH, count_items, run_items

_LINE = 64
_GENERATION, _PROGRAM, _COUNT, _STEP, _WAITING, _STOP = (_LINE * place for place in range(6))
_CLAIMED = _LINE * 8
_MAX_OPERATIONS = 8192

_SPINS_IN_STEP = 3000  # some 100 microseconds: longer than a piece takes
_SPINS_BETWEEN = 600
_PIECES = 4  # per thread and operation: fewer would leave threads waiting for the last


class Team:
    """`threads` threads: the caller of `run`, and daemons. One call at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._memory = np.zeros(_CLAIMED + _MAX_OPERATIONS * _LINE + _LINE, np.uint8)
        self._block = -(-self._memory.ctypes.data // _LINE) * _LINE
        self._helpers = [self._start(place) for place in range(1, threads)]

    def _start(self, place: int) -> threading.Thread:
        thread = threading.Thread(
            target=_serve, args=(self._block, place, self.threads), name=f"tandem-team-{place}", daemon=True
        )
        thread.start()
        return thread

    def run(self, operations: np.ndarray, step: np.ndarray) -> None:
        """Run int64 [operations, `WIDTH`] with int64 [`STEP_WORDS`]; returns when all of it is done."""
        assert len(operations) <= _MAX_OPERATIONS
        _run(self._block, operations.ctypes.data, len(operations), step.ctypes.data, self.threads)

    def close(self) -> None:
        _stop(self._block)
        for helper in self._helpers:
            helper.join()


@jit
def _run(block, program, count, step, threads):
    generation = (sync.read(block + _GENERATION) + 1) & 0x7FFFFFFF
    sync.write(block + _PROGRAM, program)
    sync.write(block + _COUNT, count)
    sync.write(block + _STEP, step)
    for place in range(count):
        sync.write(block + _CLAIMED + _LINE * place, generation << 32)
        sync.write(block + _CLAIMED + _LINE * place + 8, 0)
    sync.write(block + _GENERATION, generation)
    _wake(block, block + _GENERATION)
    _work(block, generation, 0, threads)


@jit
def _work(block, generation, thread, threads):
    """Take part in a step until it is over, or another has begun."""
    count = sync.read(block + _COUNT)
    operations = int64_array(sync.read(block + _PROGRAM), count, WIDTH)
    step = int64_array(sync.read(block + _STEP), 1, STEP_WORDS)[0]
    for place in range(count):
        claimed = block + _CLAIMED + _LINE * place
        op = operations[place]
        total = count_items(op, step)
        piece = _piece(op, total, threads)
        first = _claim(claimed, generation, piece, total)
        while first >= 0:
            last = min(first + piece, total)
            run_items(op, step, first, last, thread)
            if sync.add(claimed + 8, last - first) + last - first == total:
                _wake(block, claimed + 8)
            first = _claim(claimed, generation, piece, total)
        if not _is_done(block, claimed, generation, total):
            return


@jit
def _piece(op, total, threads):
    if op[0] == LINEAR or total > 4 * threads:
        return max(1, total // (threads * _PIECES))
    return max(1, total // threads)


@jit
def _claim(claimed, generation, piece, total):
    """The first item of a piece that is now the caller's, or -1."""
    while True:
        word = sync.read(claimed)
        following = word & 0xFFFFFFFF
        if word >> 32 != generation or following >= total:
            return -1
        if sync.replace(claimed, word, word + piece):
            return following


@jit
def _is_done(block, claimed, generation, total):
    """Wait until an operation's items are finished; False if the step is over."""
    spins = 0
    while True:
        done = sync.read(claimed + 8)
        if sync.read(block + _GENERATION) != generation:
            return False
        if done >= total:
            return True
        spins += 1
        if spins < _SPINS_IN_STEP:
            sync.pause()
        else:
            sync.add(block + _WAITING, 1)
            sync.sleep_while(claimed + 8, done)
            sync.add(block + _WAITING, -1)


@jit
def _serve(block, thread, threads):
    """A helper's life. It joins the steps that it sees begin."""
    seen = 0
    while True:
        generation = _next_generation(block, seen)
        if generation < 0:
            return
        seen = generation
        _work(block, generation, thread, threads)


@jit
def _next_generation(block, seen):
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
                sync.sleep_while(block + _GENERATION, seen)
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
