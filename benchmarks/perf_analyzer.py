"""NVIDIA's perf_analyzer: the one on PATH, else one fetched from PyPI into .cache/ (Linux on x86-64).

    python -m benchmarks.perf_analyzer -- -m llm -u localhost:8001 -i grpc --streaming --async \\
        --input-data client_examples/perf_analyzer_input.json --concurrency-range 4 --request-count 20

The wheel of an old tritonclient carries the newest binary that a glibc older than 2.38 can run. Two libraries that it
needs come with the server's wheel, or from the system.
"""

from __future__ import annotations

import os
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


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--"]:
        del arguments[0]
    binary, environment = find_perf_analyzer()
    return subprocess.run([binary, *arguments], env=environment, check=False).returncode


def find_perf_analyzer() -> tuple[Path, dict[str, str]]:
    """A binary that runs, fetched when there is none, and the environment it needs.

    Raises:
        RuntimeError: says what is missing and what to do.
    """
    found = shutil.which("perf_analyzer")
    if found and _why_not(Path(found), dict(os.environ)) is None:
        return Path(found), dict(os.environ)
    binary = CACHE / "perf_analyzer"
    if not binary.exists():
        _fetch(binary)
    environment = _with_libraries()
    if reason := _why_not(binary, environment):
        raise RuntimeError(f"{_HELP}\n{reason}")
    return binary, environment


def _why_not(binary: Path, environment: dict[str, str]) -> str | None:
    """What a binary that does not run says."""
    done = subprocess.run([binary, "--version"], env=environment, capture_output=True, text=True, check=False)
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


def _with_libraries() -> dict[str, str]:
    """This process's environment, with the server's copies of the libraries at the end of the loader's path."""
    folder = CACHE / "lib"
    folder.mkdir(exist_ok=True)
    for name, pattern in _LIBRARIES.items():
        copy = next(iter(_server_libraries().glob(pattern)), None)
        if copy and not (folder / name).exists():
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(copy)
    paths = [os.environ.get("LD_LIBRARY_PATH"), str(folder)]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(path for path in paths if path)}


def _server_libraries() -> Path:
    """Where the wheel of the server keeps its libraries; a folder that need not exist."""
    return Path(sysconfig.get_path("purelib")) / "nvidia_pytriton.libs"


if __name__ == "__main__":
    sys.exit(main())
