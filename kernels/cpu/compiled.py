"""Where compiled kernels are kept, and how they are compiled.

numba looks only at the file of a function to tell whether what it has kept is up to date; these functions are put
together from several files and for one CPU's instructions, so the folder is named after all of that.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import numba

from kernels.cpu.isa import features


def _folder() -> Path:
    """A folder for this user alone: in the user's cache, or else a temporary one. What is in it is run as code."""
    for parent in (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), Path(tempfile.gettempdir())):
        ours = parent / f"tandem-{os.getuid()}"
        folder = ours / f"kernels-{_fingerprint()}"
        try:
            ours.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
        except OSError:
            continue
        if _is_private(ours) and _is_private(folder) and os.access(folder, os.W_OK):
            return folder
    return Path(tempfile.mkdtemp(prefix="tandem-kernels-"))


def _is_private(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022


def _fingerprint() -> str:
    parts = [numba.__version__.encode(), ",".join(sorted(features())).encode()]
    parts += [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


numba.config.CACHE_DIR = str(_folder())  # type: ignore[attr-defined]

# `contract` lets products and sums become one instruction; sums keep their order.
jit = numba.njit(nogil=True, cache=True, fastmath={"contract", "nnan", "nsz", "arcp"}, error_model="numpy")
