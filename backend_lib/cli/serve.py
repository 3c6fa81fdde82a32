"""`tandem serve`: start tritonserver on a model, say when it is ready, and end with it."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time

from backend_lib.cli.flags import check_ports
from backend_lib.cli.options import Options
from backend_lib.cli.process import ServePlan, ServerProcess, started
from backend_lib.cli.watch import Watch

STUB_DIED = 1
_READY_POLL_S = 0.1
_PROGRESS_S = 5.0
# How often to look for a stub that a model load over the repository API has started.
_RESCAN_S = 1.0
# `timeout` and systemd signal a process and its whole group: what comes again this soon was meant once.
_SAME_SIGNAL_S = 1.0


def serve(options: Options) -> int:
    """Serve until a signal or the server's end. Returns the exit code.

    Raises:
        ValueError, FileNotFoundError: the server can't be started as asked; the text says why.
    """
    plan = options.plan()
    if not plan.flags.allows("http"):
        raise ValueError("tandem serve asks the server over HTTP whether the model is ready; leave --allow-http on")
    check_ports(plan.flags.endpoints)
    _ = plan.flags.exit_timeout  # refused now, not when the server has to end
    if options.model_repository is None:  # the model of a user's repository need not be Tandem's
        options.open_model()
    with Watch() as watch, started(plan) as process:
        watch.add(process.pid)
        code = _wait_ready(process, watch)
        return code if code is not None else _run(process, watch)


def _wait_ready(process: ServerProcess, watch: Watch) -> int | None:
    """None when the model is ready; an exit code when the server or the user ended it before that."""
    progress = _Progress(process.plan)
    while not process.is_ready():
        progress.show()
        event = watch.wait(_READY_POLL_S)
        if event.signal:
            return _end(process, watch)
        if event.ended == process.pid:
            code = process.kill()
            _say(f"tritonserver ended with code {code} before the model was ready; its messages are above")
            return code or 1
    _say(f"{process.plan.model} is ready after {progress.seconds:.1f} s; Ctrl-C ends it. Try:")
    print(_example(process), flush=True)
    return None


def _run(process: ServerProcess, watch: Watch) -> int:
    """Watch a server that is ready until something ends it."""
    while True:
        stubs = process.stubs()
        if not stubs and process.exit_code() is None and process.is_loaded():
            # Triton neither restarts the stub nor calls itself unhealthy, and would wait for it on a polite exit.
            _say(f"the Python backend's process for {process.plan.model} died; ending the server")
            process.kill()
            return STUB_DIED
        for pid in stubs:
            watch.add(pid)
        event = watch.wait(_RESCAN_S)
        if event.signal:
            return _end(process, watch)
        if event.ended == process.pid:
            code = process.kill()
            _say(f"tritonserver ended with code {code}")
            return code


def _end(process: ServerProcess, watch: Watch) -> int:
    """End the server on the user's wish: politely within its own time limit, at once on a second signal."""
    limit = process.plan.flags.exit_timeout
    asked = time.monotonic()
    _say(f"ending, within {limit:.0f} s; once more ends it at once")
    process.terminate()
    deadline = asked + limit + 5
    while (now := time.monotonic()) < deadline:
        event = watch.wait(deadline - now)
        if event.ended == process.pid:
            return _ended_as_asked(process)
        if event.signal and time.monotonic() > asked + _SAME_SIGNAL_S:
            break
    return process.kill()


def _ended_as_asked(process: ServerProcess) -> int:
    """The wish has been met, whatever the code: tritonserver crashes at times while it cuts its connections."""
    if code := process.kill():
        _say(f"tritonserver ended with code {code} on its way out")
    return 0


class _Progress:
    """A line every few seconds. Whole lines, because the server's own messages come in between."""

    def __init__(self, plan: ServePlan) -> None:
        self._start = time.monotonic()
        self._next = _PROGRESS_S
        self._model = plan.model
        _say(f"starting {plan.server.binary}")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def show(self) -> None:
        if self.seconds >= self._next:
            _say(f"loading {self._model} … {self.seconds:.0f} s")
            self._next += _PROGRESS_S


def _say(text: str) -> None:
    # A terminal that has hung up takes no words; the server must still end as it should.
    with contextlib.suppress(OSError):
        print(f"tandem: {text}", file=sys.stderr, flush=True)


def _example(process: ServerProcess) -> str:
    """One line to paste."""
    body = '{"text_input": "The capital of France is", "stream": true, "max_tokens": 16, "temperature": 0}'
    url = shlex.quote(f"{process.url}/v2/models/{process.plan.model}/generate_stream")
    return f"curl -N {url} -d '{body}'"
