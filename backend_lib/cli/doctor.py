"""`tandem doctor`: what a server would use on this machine, and what is missing."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Literal, NamedTuple

from backend_lib.cli.flags import ServerFlags, check_ports
from backend_lib.cli.options import Options
from backend_lib.cli.server import ServerMissingError, TritonServer, find_server, libpython_name


class Finding(NamedTuple):
    """One line of the report. Only "missing" stands in the way of serving."""

    verdict: Literal["ok", "note", "missing"]
    subject: str
    text: str


def doctor(options: Options) -> int:
    """Print what was found; 1 when something that is needed is missing."""
    findings = examine(options)
    for verdict, subject, text in findings:
        print(f"{verdict:<8} {subject:<14} {text}", flush=True)
    missing = sum(finding.verdict == "missing" for finding in findings)
    print(f"{missing} missing" if missing else "`tandem serve` can start")
    return 1 if missing else 0


def examine(options: Options) -> list[Finding]:
    """All findings, in the order in which a server would need things."""
    findings = [_python(), _numpy()]
    try:
        server = find_server(options.tritonserver)
    except ServerMissingError as error:
        findings.append(Finding("missing", "tritonserver", str(error)))
    else:
        findings += [_server(server), _backend(server), _stub(server), _libraries(server)]
    repository = _repository(options)
    model = [_model(options)] if repository.verdict == "ok" else []
    return [*findings, *_other_kernels(), _gpus(), repository, *model, *_ports(ServerFlags(options.flags))]


def _python() -> Finding:
    return Finding("ok", "python", f"{platform.python_version()} at {sys.executable}")


def _numpy() -> Finding:
    version = _installed("numpy")
    if version is None:
        return Finding("missing", "numpy", "not installed; run `pip install 'numpy<2'`")
    if int(version.split(".")[0]) >= 2:
        why = "the Python backend dies at the first string tensor with numpy 2"
        return Finding("missing", "numpy", f"{version}, but {why}; run `pip install 'numpy<2'`")
    return Finding("ok", "numpy", version)


def _server(server: TritonServer) -> Finding:
    version = _server_version(server)
    if version is None:
        return Finding("missing", "tritonserver", f"{server.binary} does not start; see the libraries below")
    return Finding("ok", "tritonserver", f"{version} at {server.binary}")


def _backend(server: TritonServer) -> Finding:
    library = server.backends / "python" / "libtriton_python.so"
    return Finding("ok" if library.exists() else "missing", "python backend", str(library))


def _stub(server: TritonServer) -> Finding:
    problem = server.stub_problem()
    return Finding("missing", "stub", problem) if problem else Finding("ok", "stub", str(server.stub))


def _libraries(server: TritonServer) -> Finding:
    missing = server.missing_libraries()
    if not missing:
        return Finding("ok", "libraries", f"all found, {libpython_name()} among them")
    hint = f"; run `apt-get install -y {libpython_name().split('.so')[0]}`" if libpython_name() in missing else ""
    return Finding("missing", "libraries", f"{', '.join(missing)} not found{hint}")


def _other_kernels() -> list[Finding]:
    """A package of the name `kernels` that isn't ours: each would hide the other's modules."""
    version = _installed("kernels")
    clash = f"kernels {version} is installed, and Tandem's package has the same name; run `pip uninstall kernels`"
    return [Finding("missing", "kernels", clash)] if version else []


def _gpus() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("note", "gpu", "no nvidia-smi; workers run on the CPU")
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    if done.returncode:
        return Finding("note", "gpu", f"nvidia-smi failed: {(done.stdout or done.stderr).strip()}")
    return Finding("ok", "gpu", "; ".join(done.stdout.strip().splitlines()))


def _repository(options: Options) -> Finding:
    return _attempt("repository", lambda: str(options.source / options.source_model), options.effective_settings)


def _model(options: Options) -> Finding:
    def describe() -> str:
        checkpoint = options.open_model()
        return f"{checkpoint.name}, context of {checkpoint.context_length} tokens"

    return _attempt("model", describe)


def _ports(flags: ServerFlags) -> list[Finding]:
    try:
        check_ports(flags.endpoints)
    except ValueError as error:
        return [Finding("missing", "ports", str(error))]
    return [Finding("ok", f"{each.name} port", f"{each.address}:{each.port} is free") for each in flags.endpoints]


def _attempt(subject: str, describe: Callable[[], str], check: Callable[[], object] | None = None) -> Finding:
    """What `describe` says, or the error of it or of `check` in words."""
    try:
        if check is not None:
            check()
        return Finding("ok", subject, describe())
    except (ValueError, OSError, ImportError) as error:
        return Finding("missing", subject, str(error))


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _server_version(server: TritonServer) -> str | None:
    """The version the server prints before it finds that the repository it was given does not exist."""
    closed = ["--allow-http=0", "--allow-grpc=0", "--allow-metrics=0"]
    command = [str(server.binary), "--model-repository=/nonexistent", *closed]
    done = subprocess.run(command, env=server.environment(), capture_output=True, text=True, timeout=60)
    found = re.search(r"server_version\s*\|\s*([\d.]+)", done.stdout + done.stderr)
    return found.group(1) if found else None
