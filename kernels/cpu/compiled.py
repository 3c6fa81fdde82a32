"""Where compiled kernels are kept, and how they are compiled.

numba looks only at the file of a function to tell whether what it has kept is up to date; these functions are put
together from several files and for one CPU's instructions, so the folder is named after all of that.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numba

from kernels.cpu.isa import features
from kernels.private_folder import private_folder


def _folder() -> Path:
    return private_folder(f"kernels-{_fingerprint()}")


def _fingerprint() -> str:
    parts = [numba.__version__.encode(), ",".join(sorted(features())).encode()]
    parts += [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


numba.config.CACHE_DIR = str(_folder())  # type: ignore[attr-defined]

# `contract` lets products and sums become one instruction; sums keep their order.
jit = numba.njit(nogil=True, cache=True, fastmath={"contract", "nnan", "nsz", "arcp"}, error_model="numpy")
