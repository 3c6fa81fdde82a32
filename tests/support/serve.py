"""The command `tandem serve` as a user runs it, for tests."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests

from tests.support.server import free_ports

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "backend_lib.cli.main", "serve")


@dataclass
class Served:
    """A `tandem serve` that has printed its line to paste, and all processes below it."""

    popen: subprocess.Popen[str]
    example: str
    errors: Path
    family: list[psutil.Process]

    @property
    def url(self) -> str:
        """The URL of the line to paste."""
        return shlex.split(self.example)[2]

    def child(self, name: str) -> int:
        """The process whose program is called `name`."""
        (found,) = (each.pid for each in self.family if Path(each.cmdline()[0]).name == name)
        return found

    def post_example(self) -> str:
        """Do what the line to paste does. Returns the body of the answer."""
        return requests.post(self.url, data=shlex.split(self.example)[4], timeout=60).text

    def wait_end(self, seconds: float) -> int:
        """The exit code; every process and every shared-memory region must have gone with it."""
        code = self.popen.wait(seconds)
        _, alive = psutil.wait_procs(self.family, timeout=2)
        assert not alive
        assert not list(Path("/dev/shm").glob(f"tandem_{self.popen.pid}_*"))
        return code

    def said(self) -> str:
        """What it has printed besides the line to paste."""
        return self.errors.read_text()


@contextlib.contextmanager
def tandem_serve(folder: Path, *flags: str, command: Sequence[str] = COMMAND) -> Iterator[Served]:
    """Run `command` with tritonserver's `flags` until its model is ready; its output and folders go to `folder`."""
    errors = folder / "errors"
    with errors.open("w") as log:
        popen = subprocess.Popen(
            [*command, "--", *free_ports(), *flags],
            cwd=ROOT if command[0] == sys.executable else folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )
    assert popen.stdout is not None
    try:
        example = popen.stdout.readline()
        assert example, errors.read_text()
        yield Served(popen, example, errors, psutil.Process(popen.pid).children(recursive=True))
    finally:
        popen.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(20)
        popen.kill()
        popen.wait()
