"""A running engine and how it is asked: the common part, and engines asked over pipes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.rivals.memory import Memory, end_family, family, memory_of
from benchmarks.rivals.waves import Answer, Prompt

_PR_SET_PDEATHSIG = 1
Command = Sequence["str | Path"]


class EngineError(Exception):
    """An engine that did not start, or gave no answer. The text says what is known of the reason."""


class Deadline:
    """What is left of the time that an engine has."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._seconds = seconds

    def left(self) -> float:
        """Seconds. Raises EngineError when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise EngineError(f"not finished in {self._seconds:.0f} s")
        return left


class Session(Protocol):
    """An engine that is ready."""

    versions: Mapping[str, str]  # as far as it says them itself
    command: Sequence[str]

    def wave(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]: ...

    def memory(self) -> Memory: ...


class Child:
    """A process with its output in a file; it ends with the thread that started it."""

    def __init__(self, command: Command, log: Path, environment: Mapping[str, str], **pipes: Any) -> None:
        self.log = log
        self.command = [str(part) for part in command]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as out:
            print("+", *self.command, file=out, flush=True)
            self.popen = subprocess.Popen(
                self.command,
                **({"stdin": subprocess.DEVNULL, "stdout": out} | pipes),
                stderr=out,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    def check(self) -> None:
        """Raises EngineError when it has ended."""
        code = self.popen.poll()
        if code is not None:
            raise EngineError(f"ended with {code}: {self.last_line()}")

    def last_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1][:300]} (log: {self.log})"

    def end(self) -> None:
        end_family(reversed(family(self.popen.pid)))
        self.popen.wait()


@contextlib.contextmanager
def child(command: Command, log: Path, environment: Mapping[str, str], **pipes: Any) -> Iterator[Child]:
    process = Child(command, log, environment, **pipes)
    try:
        yield process
    finally:
        process.end()


class RunnerSession:
    """An engine in a runner (`runners/`), asked and answering in lines of JSON."""

    def __init__(self, process: Child, deadline: Deadline) -> None:
        self._process, self._deadline = process, deadline
        self.command = process.command
        self._out: IO[bytes] = process.popen.stdout
        self.versions = self._read()["ready"]

    def wave(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
        request = {"prompts": [prompt.ids for prompt in prompts], "tokens": tokens}
        try:
            self._process.popen.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.popen.stdin.flush()
        except BrokenPipeError:
            self._ended()
        return [Answer.one_by_one(times) for times in self._read()["times"]]

    def memory(self) -> Memory:
        return memory_of(self._process.popen.pid)

    def _read(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            while not selector.select(min(self._deadline.left(), 1.0)):
                pass
        line = self._out.readline()  # a runner writes a line at once
        if not line:
            self._ended()
        return json.loads(line)

    def _ended(self) -> None:
        self._process.popen.wait(10)
        self._process.check()


@contextlib.contextmanager
def runner(command: Command, log: Path, environment: Mapping[str, str], deadline: Deadline) -> Iterator[RunnerSession]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with child(command, log, environment, **pipes) as process:
        yield RunnerSession(process, deadline)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
