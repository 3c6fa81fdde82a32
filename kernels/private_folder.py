"""Folders in which kernels keep what they have found or compiled, for one user alone."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def private_folder(name: str) -> Path:
    """A folder for this user alone: in the user's cache, or else a temporary one. What is in it is trusted, or run."""
    for parent in (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), Path(tempfile.gettempdir())):
        ours = parent / f"tandem-{os.getuid()}"
        folder = ours / name
        try:
            ours.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
        except OSError:
            continue
        if is_private(ours) and is_private(folder) and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="tandem-kernels-"))


def is_private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
