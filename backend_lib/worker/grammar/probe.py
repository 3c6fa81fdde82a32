"""`python -m backend_lib.worker.grammar.probe FD PARENT`: tries grammars out where nothing is lost with the process.

It waits on the socket FD, reads the vocabulary, and for each descriptor that comes forks a child, which has the
libraries and the vocabulary already. The child reads a grammar from its descriptor, compiles it and writes the verdict.
It says itself when that takes too long, and is ended by the kernel when nobody waits for the verdict.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from backend_lib.request import Grammar, GrammarKind
from backend_lib.worker.grammar.builder import Builder
from backend_lib.worker.grammar.prober import SECONDS
from backend_lib.worker.grammar.vocabulary import Vocabulary
from backend_lib.worker.parent import die_with_parent

BYTES = 512 << 20  # over what the process has when it is forked


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    control = socket.socket(fileno=int(sys.argv[1]))
    builder = Builder(Vocabulary.from_json(_read(control)))
    gc.freeze()  # a collection in a child would copy every page it looks at
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    while job := _next_job(control):
        if os.fork() == 0:
            control.close()
            _run(builder, job)
        job.close()


def _read(control: socket.socket) -> bytes:
    """The vocabulary, from a descriptor that is closed after it."""
    source = _next_job(control)
    assert source, "the worker ended before it sent its vocabulary"
    with source, source.makefile("rb") as stream:
        return stream.read()


def _next_job(control: socket.socket) -> socket.socket | None:
    """None when the worker is gone, and with it the other end of the socket."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if descriptors else None


def _run(builder: Builder, job: socket.socket) -> None:
    """In the child; never returns."""
    try:
        with job.makefile("rb") as stream:
            grammar = _grammar(stream.read())
        _set_limits(job)
        job.sendall(b" ")  # it begins; this is no part of the verdict
        threading.Thread(target=_watch_time, args=(job,), daemon=True).start()
        job.sendall(_verdict(builder, grammar))
    finally:
        os._exit(0)


def _grammar(text: bytes) -> Grammar:
    fields = json.loads(text)
    return Grammar(kind=GrammarKind(fields["kind"]), source=fields["source"])


def _verdict(builder: Builder, grammar: Grammar) -> bytes:
    try:
        builder.build(grammar)
    except ValueError as error:
        return json.dumps({"error": str(error)}).encode()
    return json.dumps({"error": ""}).encode()


def _watch_time(job: socket.socket) -> None:
    """Python's lock is free while xgrammar works, so this thread runs; nothing else could stop it with a word."""
    while time.process_time() < SECONDS:
        time.sleep(0.02)
    job.sendall(json.dumps({"error": f"it takes more than {SECONDS:.0f} s to compile"}).encode())
    os._exit(0)


def _set_limits(job: socket.socket) -> None:
    """Those that end the process without a word are for what cannot be, and for memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(2 * SECONDS), int(2 * SECONDS)))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # warnings about clients' grammars
    # SIGIO, which ends the process too, when the other end is shut.
    fcntl.fcntl(job, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(job, fcntl.F_SETFL, fcntl.fcntl(job, fcntl.F_GETFL) | os.O_ASYNC)


if __name__ == "__main__":
    main()
