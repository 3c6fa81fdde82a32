"""The worker's side of the tests that need two processes. Like a worker, it is given descriptors and numbers only."""

from __future__ import annotations

import sys

from backend_lib.arena import Arena, Command, CommandKind, Doorbell, SlotRef
from backend_lib.request import FinishReason

PATIENCE = 10.0  # seconds without the other side before a test counts as failed


def expected_command(sequence: int) -> Command:
    """The stream's record of a sequence: every field differs from its neighbours' and uses its whole width."""
    kind = CommandKind.ABORT if sequence % 3 == 0 else CommandKind.ADMIT
    slot = sequence * 2654435761 & 0xFFFFFFFF
    argument = sequence * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return Command(sequence, kind, slot, expected_generation(sequence), argument)


def expected_generation(sequence: int) -> int:
    return sequence | 0xABCDEF << 40


def stream(arena_fd: int, bell_fd: int, reply_fd: int, rank: int, last: int) -> None:
    """Check every command up to `last`; rank 0 also says how far it is, first in slot 0, then in the dirty list."""
    arena, bell, reply = Arena.attach(arena_fd), Doorbell(bell_fd), Doorbell(reply_fd)
    ring, dirty = arena.ring(0), arena.dirty_list(0)
    seen = 0
    while seen < last:
        commands = ring.read(rank)
        if not commands:
            assert bell.wait(PATIENCE), f"rank {rank} heard nothing after {seen}; head {ring.head}"
            continue
        for command in commands:
            seen += 1
            assert command == expected_command(seen), f"{command} is not {expected_command(seen)}"
        ring.advance(rank, seen)
        if rank == 0:
            arena.slots.publish(0, 1, seen, FinishReason.NONE, released=False)
            dirty.append([SlotRef(command.slot, command.generation) for command in commands])
            reply.ring()


def echo(arena_fd: int, bell_fd: int, reply_fd: int, last: int) -> None:
    """Answer each command with its slot, and go back to sleep."""
    arena, bell, reply = Arena.attach(arena_fd), Doorbell(bell_fd), Doorbell(reply_fd)
    ring, dirty = arena.ring(0), arena.dirty_list(0)
    reply.ring()  # up
    while ring.cursor(0) < last:
        assert bell.wait(PATIENCE), f"nothing heard after {ring.cursor(0)}; head {ring.head}"
        for command in ring.read(0):
            arena.slots.publish(0, command.generation, command.sequence, FinishReason.NONE, released=False)
            dirty.append([SlotRef(0, command.generation)])
            ring.advance(0, command.sequence)
            reply.ring()


if __name__ == "__main__":
    {"stream": stream, "echo": echo}[sys.argv[1]](*map(int, sys.argv[2:]))
