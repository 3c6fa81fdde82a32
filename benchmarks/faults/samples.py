"""What a server under load looks like, every so many seconds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from benchmarks.faults.mixed_load import Tally
from benchmarks.overload import read_metrics
from benchmarks.serving.summary import Percentiles
from tests.support.server import RunningServer

MIB = 1 << 20
_METRICS = {
    "running": "tandem_requests_running", "waiting": "tandem_requests_waiting",
    "paused": "tandem_requests_paused", "KV tokens": "tandem_kv_tokens{state=used}",
    "restarts": "tandem_worker_restarts_total",
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """`seconds` since the start. `values` by name; one that could not be read just then is missing."""

    seconds: float
    values: Mapping[str, float]
    errors: Mapping[str, int]


class Sampler:
    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._started = self._last = time.perf_counter()
        self.samples: list[Sample] = []

    def take(self, tally: Tally) -> None:
        """One more sample. `tally`: what came of the requests since the last one."""
        now = time.perf_counter()
        metrics = read_metrics(self._server.metrics_url)
        values = {name: metrics[key] for name, key in _METRICS.items() if key in metrics}
        values |= self._of_processes() | _latencies(tally)
        seconds, self._last = now - self._last, now
        values |= {"requests/s": tally.answered.total() / seconds, "tokens/s": tally.tokens / seconds}
        self.samples.append(Sample(now - self._started, values, dict(tally.errors)))

    def _of_processes(self) -> dict[str, float]:
        processes = {"tritonserver": self._server.pid, "router": self._server.stub_pid}
        worker = worker_of(self._server)
        if worker:
            processes["worker"] = worker.pid
        values: dict[str, float] = {}
        for name, pid in processes.items():
            try:
                process = psutil.Process(pid)
                with process.oneshot():
                    found = {
                        f"{name} MiB": process.memory_info().rss / MIB,
                        f"{name} descriptors": process.num_fds(),
                        f"{name} threads": process.num_threads(),
                    }
            except psutil.NoSuchProcess:  # a worker that has just ended
                continue
            values |= found
        return values


def worker_of(server: RunningServer) -> psutil.Process | None:
    """The worker, if there is one just now."""
    for pid in server.worker_pids:
        try:
            process = psutil.Process(pid)
            if "backend_lib.worker" in process.cmdline():
                return process
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return None


def _latencies(tally: Tally) -> dict[str, float]:
    values = {}
    for name, seconds in (("TTFT", tally.ttft), ("inter-token", tally.inter_token)):
        found = Percentiles.of([value * 1e3 for value in seconds])
        if found:
            values |= {f"{name} p50 ms": found.p50, f"{name} p99 ms": found.p99}
    return values
