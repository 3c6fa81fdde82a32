"""One worker as an operating-system process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path

from backend_lib.arena import Arena
from backend_lib.arena.status import LOST_GROUP
from backend_lib.router.group import Group
from backend_lib.router.seats import Seat

_VM_COUNTERS = Path("/proc/vmstat")
_OUTSIDERS_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

WORKER = "backend_lib.worker"
_ROOT = Path(__file__).resolve().parents[2]  # where backend_lib and kernels are imported from


class WorkerProcess:
    """Started by the thread that will live as long as the worker may: the kernel kills the worker with that thread.

    The worker has a session of its own, so that Ctrl-C in a terminal reaches Triton first.
    """

    def __init__(self, arena: Arena, group: Group, *, rank: int, seat: Seat, server: int | None) -> None:
        """`server`: a pidfd of the process with which the router is to end, if there is one."""
        self.rank = rank
        fds = {"arena": arena.fd, "replies": group.replies.fd} | ({} if server is None else {"server": server})
        bells = [bell.fd for bell in group.bells]
        numbers = {"group": group.index, "rank": rank, "epoch": arena.epoch(group.index), "parent": os.getpid()}
        arguments = [f"--{name}={value}" for name, value in (fds | numbers).items()]
        arguments.append(f"--bells={','.join(map(str, bells))}")
        if seat.cores:
            arguments.append(f"--cores={','.join(map(str, seat.cores))}")
        self._oom_kills = _oom_kills()
        self._process = subprocess.Popen(
            [python_executable(), "-m", WORKER, *arguments],
            pass_fds=[*fds.values(), *bells], start_new_session=True, stdin=subprocess.DEVNULL, env=_environment(seat),
        )  # fmt: skip
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Have it ended; `reap` waits."""
        self._process.kill()

    def reap(self) -> None:
        """Wait for its end, which was ordered: afterwards it touches the arena no more."""
        self._process.wait()
        os.close(self.pidfd)

    def activity(self, ticks: int) -> Hashable:
        """Changes while it reads, and as often as it has computed for so many clock ticks."""
        try:
            user, system = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            read = Path(f"/proc/{self.pid}/io").read_text().partition("\n")[0]
            return (int(user) + int(system)) // ticks, read
        except OSError:
            return None  # it has just ended

    @property
    def lost_its_group(self) -> bool:
        """It ended because another rank had."""
        return self._process.returncode == LOST_GROUP

    @property
    def was_killed_from_outside(self) -> bool:
        """By somebody's signal: not by a fault, nor because it took more memory than there is."""
        code = self._process.returncode
        return code is not None and -code in _OUTSIDERS_SIGNALS and _oom_kills() == self._oom_kills

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with status {code}"


def _oom_kills() -> int:
    """Processes that this machine's kernel has killed for lack of memory."""
    counters = dict(line.split() for line in _VM_COUNTERS.read_text().splitlines())
    return int(counters.get("oom_kill", 0))


def python_executable() -> str:
    """The interpreter of this environment. Inside Triton's stub `sys.executable` can be empty or another Python."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (Path(sys.prefix, "bin", name), Path(sys.prefix, "bin", "python3"), Path(sys.executable or "/")):
        if candidate.is_file():
            return str(candidate)
    found = shutil.which(name) or shutil.which("python3")
    if found is None:
        raise FileNotFoundError(f"no {name} in {sys.prefix}/bin or on PATH to start a worker with")
    return found


def _environment(seat: Seat) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    gpu = {"CUDA_VISIBLE_DEVICES": seat.gpu} if seat.gpu else {}
    return os.environ | {"PYTHONPATH": path} | gpu
