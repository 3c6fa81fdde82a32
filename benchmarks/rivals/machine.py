"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

# What decides which kernels an engine takes.
_TELLING = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16", "f16c", "fma")


def describe() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text()
    flags = _field(info, "flags").split()
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "processor": _field(info, "model name"), "family": _field(info, "cpu family"), "model": _field(info, "model"),
        "cores": os.cpu_count(), "memory GiB": round(int(memory) / (1 << 20), 1), "system": platform.platform(),
        "python": platform.python_version(), "kernels": [flag for flag in _TELLING if flag in flags], "flags": flags,
        "revision": _revision(),
    }  # fmt: skip


def _field(info: str, name: str) -> str:
    lines = (line.partition(":") for line in info.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _revision() -> str:
    """Of this checkout; "" when it is none."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip()
