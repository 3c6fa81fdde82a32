"""The Triton server on this machine: where it is, which Python its backend embeds, and what it needs to start."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

CONTAINER_SERVER = Path("/opt/tritonserver/bin/tritonserver")
STUB_NAME = "triton_python_backend_stub"


class ServerMissingError(ValueError):
    """No usable tritonserver; the text says what was looked for and what to do."""


@dataclass(frozen=True, kw_only=True)
class TritonServer:
    """A tritonserver binary with its Python backend.

    `private_backends` is true for the server inside the `nvidia-pytriton` wheel, whose backend folder lacks the stub:
    one has to be put together (`link_backends`). A system server has a folder of its own beside `bin`.
    """

    binary: Path
    backends: Path
    stub: Path
    library_dirs: tuple[Path, ...] = ()
    private_backends: bool = False

    @property
    def stub_python(self) -> str | None:
        """The Python version the stub embeds, such as "3.11"; None when the stub does not say."""
        found = re.search(rb"libpython(3\.\d+)\.so", self.stub.read_bytes()) if self.stub.is_file() else None
        return found.group(1).decode() if found else None

    def stub_problem(self) -> str | None:
        """Why the stub can't run Tandem, in words; None when it can."""
        if self.stub_python is None:
            return f"{self.stub}: there is none for Python {_python_version()}"
        if self.stub_python != _python_version():
            why = f"embeds Python {self.stub_python}, but Tandem is installed for Python {_python_version()}"
            return f"{self.stub} {why}"
        return None

    def environment(self) -> dict[str, str]:
        """This process's environment, changed so that the stub embeds the Python that runs now."""
        env = dict(os.environ)
        folders = [str(folder) for folder in (*self.library_dirs, *_libpython_dirs())]
        env["LD_LIBRARY_PATH"] = _joined(folders, env.get("LD_LIBRARY_PATH"))
        # The embedded Python takes its prefix and site-packages from the first `python3` on PATH.
        env["PATH"] = _joined([str(Path(sys.executable).parent)], env.get("PATH"))
        return env

    def link_backends(self, folder: Path) -> None:
        """Fill `folder` with a backend directory that has the Python backend and the right stub side by side."""
        python = folder / "python"
        python.mkdir(parents=True)
        for source in (self.backends / "python").iterdir():
            if source.name != "__pycache__":
                (python / source.name).symlink_to(source)
        (python / STUB_NAME).symlink_to(self.stub)

    def missing_libraries(self) -> list[str]:
        """Shared libraries that the server or its stub would not find."""
        return sorted({name for binary in (self.binary, self.stub) for name in _unresolved(binary, self.environment())})


def find_server(explicit: Path | None = None) -> TritonServer:
    """The server named by the user, else the container's, else the one on PATH, else the wheel's.

    Raises:
        ServerMissingError: says what was looked for.
    """
    if explicit is not None:
        if not os.access(explicit, os.X_OK) or explicit.is_dir():
            raise ServerMissingError(f"--tritonserver {explicit}: no such program")
        return _system_server(explicit)
    if CONTAINER_SERVER.exists():
        return _system_server(CONTAINER_SERVER)
    on_path = shutil.which("tritonserver")
    server = _system_server(Path(on_path)) if on_path else _wheel_server()
    if server is None:
        raise ServerMissingError(
            f"no tritonserver: not at {CONTAINER_SERVER}, not on PATH, and the wheel is not installed; "
            "run `pip install nvidia-pytriton==0.7.0`, or name one with --tritonserver"
        )
    return server


def libpython_name() -> str:
    """The file the stub of the running Python version is linked with."""
    return f"libpython{_python_version()}.so.1.0"


def _system_server(binary: Path) -> TritonServer:
    # The real path: a link such as /usr/local/bin/tritonserver says nothing about where the backends are.
    backends = binary.resolve().parent.parent / "backends"
    return TritonServer(binary=binary, backends=backends, stub=backends / "python" / STUB_NAME)


def _wheel_server() -> TritonServer | None:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = Path(spec.submodule_search_locations[0])
    root = package / "tritonserver"
    return TritonServer(
        binary=root / "bin" / "tritonserver",
        backends=root / "backends",
        stub=root / "python_backend_stubs" / _python_version() / STUB_NAME,
        library_dirs=(package.parent / "nvidia_pytriton.libs",),
        private_backends=True,
    )


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _libpython_dirs() -> list[Path]:
    """Where this Python keeps its own libpython, when it has one; the system's loader finds the others by itself."""
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/nonexistent")
    return [folder] if (folder / libpython_name()).exists() else []


def _unresolved(binary: Path, env: dict[str, str]) -> list[str]:
    done = subprocess.run(["ldd", str(binary)], env=env, capture_output=True, text=True)
    return re.findall(r"^\s*(\S+) => not found", done.stdout, re.MULTILINE)


def _joined(folders: list[str], rest: str | None) -> str:
    return os.pathsep.join([*folders, *([rest] if rest else [])])
