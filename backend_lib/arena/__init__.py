"""What crosses the process boundary between the router and its workers, and nothing else."""

from backend_lib.arena.arena import Arena, ArenaMismatch
from backend_lib.arena.decisions import MAX_EVENTS, Decision, DecisionRing, Digests, Event, RankBehind
from backend_lib.arena.dirty import DirtyList, SlotRef
from backend_lib.arena.extents import ExtentAllocator
from backend_lib.arena.layout import ArenaSpec, logprob_row
from backend_lib.arena.ring import LEAD_SHARE, Command, CommandKind, CommandRing, RingFull
from backend_lib.arena.slots import Published, SlotTable
from backend_lib.arena.status import Load, StatusBlock, WorkerState
from backend_lib.arena.wakeup import Doorbell

__all__ = [
    "LEAD_SHARE",
    "MAX_EVENTS",
    "Arena",
    "ArenaMismatch",
    "ArenaSpec",
    "Command",
    "CommandKind",
    "CommandRing",
    "Decision",
    "DecisionRing",
    "Digests",
    "DirtyList",
    "Doorbell",
    "Event",
    "ExtentAllocator",
    "Load",
    "Published",
    "RankBehind",
    "RingFull",
    "SlotRef",
    "SlotTable",
    "StatusBlock",
    "WorkerState",
    "logprob_row",
]
