"""A running tritonserver: started, asked whether it is ready, watched and ended with everything it started."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.request import ProxyHandler, Request, build_opener

from backend_lib.cli.flags import ServerFlags
from backend_lib.cli.leftovers import owner_mark, remove_leftovers
from backend_lib.cli.repository import link_repository
from backend_lib.cli.server import STUB_NAME, TritonServer

_PR_SET_PDEATHSIG = 1
_SHM = Path("/dev/shm")
# The server is on this machine: http_proxy is not meant for it.
_open = build_opener(ProxyHandler({})).open


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """All that decides how a server is started.

    `model` is the name it is served under; `source_model` its folder in `source`. `settings` are written into its
    config.pbtxt.
    """

    server: TritonServer
    source: Path
    source_model: str
    model: str
    settings: Mapping[str, str]
    flags: ServerFlags


class ServerProcess:
    """One tritonserver, its own session's leader, so that a Ctrl-C reaches whoever started it and not the server."""

    def __init__(self, plan: ServePlan, run: Path, log: IO[Any] | None = None) -> None:
        self.plan = plan
        self.shm_prefix = f"tandem_{owner_mark()}{uuid.uuid4().hex[:8]}_"
        self._killed = False
        self._popen = subprocess.Popen(
            [str(plan.server.binary), *self._arguments(run)],
            env=plan.server.environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def url(self) -> str:
        """Base URL of the HTTP endpoint, as a client on this machine sees it."""
        return f"http://{self.plan.flags.http.host}:{self.plan.flags.http.port}"

    def exit_code(self) -> int | None:
        """The server's exit code, 128 + signal when it was killed, None while it runs."""
        code = self._popen.poll()
        return 128 - code if code is not None and code < 0 else code

    def is_ready(self) -> bool:
        """Whether the model answers; a server that does not listen yet is not ready."""
        try:
            with _open(f"{self.url}/v2/models/{self.plan.model}/ready", timeout=2) as answer:
                return answer.status == 200
        except OSError:
            return False

    def is_loaded(self) -> bool:
        """Whether the server believes that the model is loaded: not while it unloads the model or ends itself.

        A server too busy to answer counts as one that believes so.
        """
        request = Request(f"{self.url}/v2/repository/index", data=b"{}", method="POST")
        try:
            with _open(request, timeout=1) as answer:
                index = json.load(answer)
        except TimeoutError:
            return True
        except OSError:
            # On its way out the server first refuses requests and then closes its door.
            return False
        return any(entry["name"] == self.plan.model and entry.get("state") == "READY" for entry in index)

    def stubs(self) -> list[int]:
        """Processes of the Python backend that serve the model."""
        folder = f"/{self.plan.model}/".encode()
        return [pid for pid in _children(self.pid) if STUB_NAME.encode() in (line := _command(pid)) and folder in line]

    def terminate(self) -> None:
        """Ask the server to unload its models and exit; returns at once."""
        self._popen.terminate()

    def end(self) -> int:
        """Ask the server to unload and exit, kill what is left after its own time limit, and return its exit code."""
        if self.exit_code() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(self.plan.flags.exit_timeout + 5)
        return self.kill()

    def kill(self) -> int:
        """Kill the server and its stubs; workers end with their stub. Nothing of it stays in shared memory."""
        if not self._killed:
            # Once only: the number of a group that has gone may be given to somebody else's.
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        for region in _SHM.glob(f"{self.shm_prefix}*"):
            region.unlink(missing_ok=True)
        return self.exit_code() or 0

    def _arguments(self, run: Path) -> list[str]:
        plan = self.plan
        private = [f"--backend-directory={run / 'backends'}"] if plan.server.private_backends else []
        # A prefix of its own, so that what a killed server leaves in shared memory can be told from other servers'.
        prefix = f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}"
        load = plan.flags.load(plan.model)
        return [f"--model-repository={run / 'models'}", *private, prefix, *plan.flags.arguments, *load]


@contextlib.contextmanager
def started(plan: ServePlan, log: IO[Any] | None = None) -> Iterator[ServerProcess]:
    """Start the server on a private model repository; on leaving, end it and remove what was made for it."""
    remove_leftovers(Path(tempfile.gettempdir()), _SHM)
    with tempfile.TemporaryDirectory(prefix=f"tandem-{owner_mark()}") as folder:
        run = Path(folder)
        rename = (plan.source_model, plan.model)
        link_repository(plan.source, run / "models", rename=rename, settings=plan.settings)
        if plan.server.private_backends:
            plan.server.link_backends(run / "backends")
        process = ServerProcess(plan, run, log)
        try:
            yield process
        finally:
            process.end()


def _die_with_parent() -> None:
    """Runs in the child before exec: a killed parent must not leave a server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _children(pid: int) -> list[int]:
    """Child processes, whichever thread of `pid` started them."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, task.read_text().split())
    return children


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
