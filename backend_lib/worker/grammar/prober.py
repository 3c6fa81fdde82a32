"""The worker's side of the process that tries grammars out (`probe`)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict

from backend_lib.request import Grammar
from backend_lib.worker.grammar.vocabulary import Vocabulary

SECONDS = 5.0  # of a processor's time, that a grammar may take
# Seconds in all, for the process to begin and for the verdict; what takes longer on a busy machine has gone wrong.
_PATIENCE = 20.0


class Attempt:
    """A grammar that is being tried out. Made, waited for and closed by one thread; any thread may `stop` it.

    `verdict`: what is wrong with it, in words for the client; "" when nothing is; None while there is none, and when
    the process was killed before it, or `hangs`.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._grammar = json.dumps(asdict(grammar)).encode()
        self.is_stopped = False
        self.hangs = False
        self.verdict: str | None = None

    def wait(self) -> None:
        """Until there is a verdict, or it is clear that there will be none."""
        with self._ours:
            try:
                if verdict := self._read():
                    self.verdict = str(json.loads(verdict)["error"])
            except TimeoutError:
                self.hangs = True
            except OSError:  # stopped, or the process has ended
                pass

    def _read(self) -> bytes:
        self._ours.settimeout(_PATIENCE)
        self._ours.sendall(self._grammar)
        self._ours.shutdown(socket.SHUT_WR)
        with self._ours.makefile("rb") as stream:
            return stream.read().strip()  # what it says when it begins is no part of the verdict

    def stop(self) -> None:
        """The kernel ends the process; the verdict means nothing any more."""
        self.is_stopped = True
        with suppress(OSError):  # it is over
            self._ours.shutdown(socket.SHUT_RDWR)


class Prober:
    """Starts the process with the first grammar, and again when it has ended. It ends with this one, at the latest
    with the thread that started it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._control: socket.socket | None = None

    def send(self, attempt: Attempt) -> int | None:
        """Let the process begin it; the process's id."""
        with self._lock, attempt.theirs:
            try:
                self._send(attempt.theirs)
            except OSError:
                self.close()
                self._send(attempt.theirs)
            return self.pid

    def start(self) -> None:
        """Have the process import and read while the caller does."""
        with self._lock:
            self._started()

    def restart(self, pid: int | None) -> None:
        """End the process, if it is still that one: it hangs."""
        with self._lock:
            if pid == self.pid:
                self.close()

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
        [sys.executable, "-m", "backend_lib.worker.grammar.probe", str(control.fileno()), str(os.getpid())],
        pass_fds=[control.fileno()], stdin=subprocess.DEVNULL,
    )  # fmt: skip


def _write(stream: socket.socket, vocabulary: Vocabulary) -> None:
    with stream, suppress(OSError):  # the process has ended; whoever waits for a verdict will see it
        stream.sendall(vocabulary.to_json())
