"""What is removed as a dead server's, and what is not touched."""

from __future__ import annotations

import os
import subprocess

import pytest

from backend_lib.cli.leftovers import owner_mark, remove_leftovers


def dead_mark() -> str:
    """The mark of a process that has ended."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    return owner_mark().replace(str(os.getpid()), str(ended.pid), 1)


def test_what_a_dead_process_left_is_removed(tmp_path):
    (tmp_path / f"tandem-{dead_mark()}x" / "models").mkdir(parents=True)
    (tmp_path / f"tandem_{dead_mark()}x").touch()
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_number_given_again_does_not_keep_it(tmp_path):
    pid, start, namespace, _ = owner_mark().split("_")
    (tmp_path / f"tandem_{pid}_{int(start) - 1}_{namespace}_x").touch()
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tandem_{alive}x", "tandem_x", "tandem-notes", "other_{dead}x"])
def test_what_is_alive_or_nobody_knows_stays(tmp_path, name):
    (tmp_path / name.format(alive=owner_mark(), dead=dead_mark())).touch()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir())


def test_another_namespaces_stays(tmp_path):
    pid, start, namespace, _ = dead_mark().split("_")
    (tmp_path / f"tandem_{pid}_{start}_{int(namespace) + 1}_x").touch()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir())


def test_another_users_stays(tmp_path, monkeypatch):
    (tmp_path / f"tandem_{dead_mark()}x").touch()
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir())
