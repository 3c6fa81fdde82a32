"""What logs call a worker."""

from __future__ import annotations

from backend_lib.arena.layout import ArenaSpec


def worker_name(spec: ArenaSpec, pid: int, group: int, rank: int) -> str:
    """Such as "worker 123, rank 1 of group 0", without what there is only one of."""
    rank_words = f", rank {rank}" if spec.num_ranks > 1 else ""
    return f"worker {pid}{rank_words}{of_group(spec, group)}"


def of_group(spec: ArenaSpec, group: int) -> str:
    return f" of group {group}" if spec.num_groups > 1 else ""
