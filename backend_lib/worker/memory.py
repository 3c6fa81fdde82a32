"""How much memory of the host a worker may still take."""

from __future__ import annotations

from pathlib import Path

# The kernel's words for "no limit" in the two versions of control groups.
_CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Bytes of memory that are free for this process, within the container's limit when there is one."""
    free = _meminfo("MemAvailable")
    for limit_path, usage_path in _CGROUP_LIMITS:
        limit, usage = _read_int(limit_path), _read_int(usage_path)
        if limit is not None and usage is not None:
            free = min(free, max(limit - usage, 0))
    return free


def _meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == key:
            return int(rest.split()[0]) * 1024
    raise KeyError(key)


def _read_int(path: str) -> int | None:
    """The number in a file; None when there is no file or it says `max`."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None
