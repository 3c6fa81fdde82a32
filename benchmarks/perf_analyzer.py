"""NVIDIA's perf_analyzer: the one on PATH, else one fetched from PyPI into .cache/ (Linux on x86-64).

    python -m benchmarks.perf_analyzer -- -m llm -u localhost:8001 -i grpc --streaming --async \\
        --input-data client_examples/perf_analyzer_input.json --concurrency-range 4 --request-count 20

The wheel of an old tritonclient carries a binary for glibc 2.34 and newer; later wheels want 2.38. Two libraries that
it needs come with the server's wheel, or from the system. With `--version` as the only flag it is just made ready.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

WHEEL = "tritonclient==2.49.0"
CACHE = Path(__file__).parents[1] / ".cache" / "perf_analyzer"
# The name that the loader looks for, and how the server's wheel has renamed it.
_LIBRARIES = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12.*"}
_HELP = "perf_analyzer does not start; its libraries (libb64, libcudart 12) come with `pip install nvidia-pytriton`"
_LAUNCHER = """#!/bin/sh
here=$(dirname "$(dirname "$(readlink -f "$0")")")
LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/lib" exec "$here/perf_analyzer" "$@"
"""


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--"]:
        del arguments[0]
    return subprocess.run([find_perf_analyzer(), *arguments], check=False).returncode


def find_perf_analyzer() -> Path:
    """One that starts, fetched when there is none. The fetched one can be put on PATH: it is alone in its folder.

    Raises:
        RuntimeError: says what is missing and what to do.
    """
    found = shutil.which("perf_analyzer")
    if found and _why_not(Path(found)) is None:
        return Path(found)
    if not (CACHE / "perf_analyzer").exists():
        _fetch(CACHE / "perf_analyzer")
    launcher = _make_launcher()
    if reason := _why_not(launcher):
        raise RuntimeError(f"{_HELP}\n{reason}")
    return launcher


def _why_not(program: Path) -> str | None:
    """What one that does not start says."""
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 and "Perf Analyzer" in done.stdout + done.stderr else done.stderr


def _fetch(binary: Path) -> None:
    print(f"fetching perf_analyzer from {WHEEL}", file=sys.stderr)
    binary.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", folder, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/bin/perf_analyzer"))
            extracted = Path(archive.extract(name, folder))
        extracted.chmod(0o755)
        extracted.rename(binary)  # whole or not at all


def _make_launcher() -> Path:
    """The binary behind a loader's path that ends with the server's copies of the libraries."""
    for name, pattern in _LIBRARIES.items():
        link = CACHE / "lib" / name
        link.parent.mkdir(exist_ok=True)
        copy = next(iter(_server_libraries().glob(pattern)), None)
        if copy and not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(copy)
    launcher = CACHE / "bin" / "perf_analyzer"
    launcher.parent.mkdir(exist_ok=True)
    if not launcher.exists():
        launcher.write_text(_LAUNCHER)
        launcher.chmod(0o755)
    return launcher


def _server_libraries() -> Path:
    """Where the wheel of the server keeps its libraries; a folder that need not exist."""
    return Path(sysconfig.get_path("purelib")) / "nvidia_pytriton.libs"


if __name__ == "__main__":
    sys.exit(main())
