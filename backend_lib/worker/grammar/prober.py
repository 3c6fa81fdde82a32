"""The worker's side of the process that tries grammars out (`probe`)."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict

from backend_lib.request import Grammar
from backend_lib.worker.grammar.vocabulary import Vocabulary

SECONDS = 5.0  # a grammar may take
NOT_BEGUN = "the process ended before it came to the grammar"
_LAST_RESORT = 60.0  # seconds, for the process to begin


class Attempt:
    """A grammar that is being tried out. Made, asked and closed by one thread; any thread may `stop` it."""

    def __init__(self, grammar: Grammar) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._grammar = json.dumps(asdict(grammar)).encode()
        self.is_stopped = False

    def error(self) -> str:
        """What is wrong with the grammar, in words for the client; "" when nothing is; or NOT_BEGUN."""
        with self._ours:
            try:
                return self._read()
            except OSError:
                return NOT_BEGUN

    def _read(self) -> str:
        self._ours.settimeout(_LAST_RESORT)
        self._ours.sendall(self._grammar)
        self._ours.shutdown(socket.SHUT_WR)
        if not self._ours.recv(1):
            return NOT_BEGUN
        began = time.monotonic()
        with self._ours.makefile("rb") as stream:
            verdict = stream.read()
        if verdict:
            return str(json.loads(verdict)["error"])
        if time.monotonic() - began > SECONDS * 0.9:
            return f"it takes more than {SECONDS:.0f} s to compile"
        return "it takes too much memory to compile"

    def stop(self) -> None:
        """The kernel ends the process; what `error` gives means nothing any more."""
        self.is_stopped = True
        with suppress(OSError):  # it is over
            self._ours.shutdown(socket.SHUT_RDWR)


class Prober:
    """Starts the process with the first grammar, and again when it has ended. It ends with this one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    def send(self, attempt: Attempt) -> None:
        """Let the process begin it."""
        with self._lock, attempt.theirs:
            try:
                self._send(attempt.theirs)
            except OSError:
                self.close()
                self._send(attempt.theirs)

    def start(self) -> None:
        """Have the process import and read while the caller does."""
        with self._lock:
            self._started()

    def close(self) -> None:
        if self._control and self._process:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def _send(self, descriptor: socket.socket) -> None:
        socket.send_fds(self._started(), [b"!"], [descriptor.fileno()])

    def _started(self) -> socket.socket:
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = _start(theirs)
            self._send_vocabulary(self._control)
        return self._control

    def _send_vocabulary(self, control: socket.socket) -> None:
        """Written by a thread: the process reads it only when it has imported what it needs."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(control, [b"!"], [theirs.fileno()])
        threading.Thread(target=_write, args=(ours, self._vocabulary), daemon=True).start()


def _start(control: socket.socket) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "backend_lib.worker.grammar.probe", str(control.fileno())],
        pass_fds=[control.fileno()], stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _write(stream: socket.socket, vocabulary: Vocabulary) -> None:
    with stream, suppress(OSError):  # the process has ended; whoever waits for a verdict will see it
        stream.sendall(vocabulary.to_json())
