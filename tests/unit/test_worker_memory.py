"""How much memory is free, inside a container and outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend_lib.worker import memory


@pytest.fixture
def limits(tmp_path, monkeypatch):
    """Writes a control group's limit and usage where they are looked for."""
    paths = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", ((str(paths[0]), str(paths[1])),))
    monkeypatch.setattr(memory, "_meminfo", lambda key: 1000)

    def write(limit: str | None, usage: str | None) -> None:
        for path, text in zip(paths, (limit, usage), strict=True):
            if text is not None:
                Path(path).write_text(text + "\n")

    return write


@pytest.mark.parametrize(
    "limit, usage, free",
    [
        (None, None, 1000),
        ("max", "300", 1000),
        ("900", "300", 600),
        ("5000", "300", 1000),
        ("9223372036854771712", "300", 1000),  # "no limit" in version 1
        ("300", "400", 0),
        ("900", None, 1000),
    ],
)
def test_the_smaller_of_machine_and_container(limits, limit, usage, free) -> None:
    limits(limit, usage)
    assert memory.available_bytes() == free


def test_this_machine() -> None:
    assert 0 < memory.available_bytes() <= memory._meminfo("MemTotal")
