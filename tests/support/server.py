"""A real tritonserver for tests, started through the same code as `tandem serve`."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from backend_lib.cli.flags import ServerFlags
from backend_lib.cli.process import ServePlan, ServerProcess, started
from backend_lib.cli.repository import SHIPPED_MODEL, shipped_repository
from backend_lib.cli.server import find_server

_ATTEMPTS = 3


class PortTakenError(AssertionError):
    """Somebody else took a port between the probe and the server's start."""


@dataclass(frozen=True)
class RunningServer:
    """A server whose model is ready."""

    process: ServerProcess
    log_file: Path

    @property
    def name(self) -> str:
        return self.process.plan.model

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def http_url(self) -> str:
        """Base URL with its scheme, such as http://127.0.0.1:8000."""
        return self.process.url

    @property
    def grpc_url(self) -> str:
        """host:port, as tritonclient wants it."""
        grpc = next(endpoint for endpoint in self.process.plan.flags.endpoints if endpoint.name == "grpc")
        return f"{grpc.host}:{grpc.port}"

    @property
    def metrics_url(self) -> str:
        metrics = next(endpoint for endpoint in self.process.plan.flags.endpoints if endpoint.name == "metrics")
        return f"http://{metrics.host}:{metrics.port}/metrics"

    @property
    def stub_pids(self) -> list[int]:
        return self.process.stubs()

    @property
    def stub_pid(self) -> int:
        """The router's process."""
        (pid,) = self.stub_pids
        return pid

    @property
    def worker_pids(self) -> list[int]:
        """Whatever the router started and what that started."""
        return [child.pid for stub in self.stub_pids for child in _descendants(stub)]

    @property
    def log(self) -> str:
        """What the server and its stub have printed so far."""
        return self.log_file.read_text(errors="replace")

    def wait_ready(self, timeout: float = 120) -> None:
        """Wait until the model is ready and every door is open; Triton opens the metrics' last.

        Raises:
            AssertionError: with the server's log when that never comes.
        """
        deadline = time.monotonic() + timeout
        while not (self.process.is_ready() and all(map(_is_open, self.process.plan.flags.endpoints))):
            code = self.process.exit_code()
            if code is not None and "already in use" in self.log:
                raise PortTakenError(self.log)
            assert code is None, f"tritonserver ended with {code} before the model was ready:\n{self.log}"
            assert time.monotonic() < deadline, f"the model is not ready after {timeout} s:\n{self.log}"
            time.sleep(0.05)


def _is_open(endpoint) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((endpoint.host, endpoint.port), timeout=2):
        return True
    return False


@contextlib.contextmanager
def running_server(
    *,
    model: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    name: str = SHIPPED_MODEL,
    repository: Path | None = None,
    repository_mode: str = "none",
    extra_flags: Sequence[str] = (),
    timeout: float = 120,
) -> Iterator[RunningServer]:
    """Serve the shipped model repository (or `repository`) and end it again; nothing may be left of it.

    `model` and `settings` are parameters of config.pbtxt. With `repository_mode` "explicit" the model is loaded at
    the start and can be unloaded and loaded over the repository API.
    """
    values = {key: str(value) for key, value in (settings or {}).items()}
    if model is not None:
        values["model"] = str(model)
    flags = [f"--model-control-mode={repository_mode}", "--log-info=1", *extra_flags]
    with contextlib.ExitStack() as stack:
        yield _start_with_retry(stack, repository or shipped_repository(), name, values, flags, timeout)


def _start_with_retry(
    stack: contextlib.ExitStack, source: Path, name: str, settings: dict[str, str], flags: list[str], timeout: float
) -> RunningServer:
    for attempt in range(_ATTEMPTS):
        plan = ServePlan(
            server=find_server(),
            source=source,
            source_model=SHIPPED_MODEL,
            model=name,
            settings=settings,
            flags=ServerFlags((*free_ports(), *flags)),
        )
        attempted = stack.enter_context(contextlib.ExitStack())
        server = attempted.enter_context(_watched(plan))
        try:
            server.wait_ready(timeout)
            return server
        except PortTakenError:
            attempted.close()
            if attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


@contextlib.contextmanager
def _watched(plan: ServePlan) -> Iterator[RunningServer]:
    """A server that has started; on leaving, every process and every shared-memory region of it must be gone."""
    with tempfile.TemporaryDirectory(prefix="tandem-test-") as folder:
        log_file = Path(folder) / "server.log"
        with log_file.open("w") as log, started(plan, log) as process:
            server = RunningServer(process, log_file)
            try:
                yield server
            except BaseException:
                print(server.log)  # pytest shows it beside the failure
                raise
            finally:
                family = _descendants(process.pid)
                if not server.stub_pids:
                    # With its stub dead the server would wait for it until its time limit.
                    process.kill()
        _check_nothing_left(server, family)


def _check_nothing_left(server: RunningServer, family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive, f"still running after the server ended: {alive}\n{server.log}"
    left = list(Path("/dev/shm").glob(f"{server.process.shm_prefix}*"))
    assert not left, f"left in shared memory: {left}"


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def free_ports() -> list[str]:
    """Flags with three ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(3)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        ports = [each.getsockname()[1] for each in sockets]
    return [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
