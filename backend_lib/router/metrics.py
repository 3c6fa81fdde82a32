"""Every metric of a model in one table, and where its values are kept until they are pushed to Triton."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# Observations that wait to be written. Beyond it the oldest are dropped: a histogram is a sample, memory is not.
MAX_OBSERVATIONS = 20_000


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One metric.

    Attributes:
        label: its own label, beside `model` and `version`; "" when it has none.
        values: what that label can be. All are there from the start, so that rates begin at 0.
        buckets: upper bounds of a histogram.
        like: another family whose values this one repeats, for dashboards that know it by another name.
    """

    name: str
    kind: Kind
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()
    like: Family | None = None

    @property
    def source(self) -> Family:
        return self.like or self


class Series(NamedTuple):
    """One line of numbers: a family and the value of its label."""

    family: str
    value: str = ""


def _counter(name: str, help: str, label: str = "", *values: str, like: Family | None = None) -> Family:
    return Family(name=name, kind=Kind.COUNTER, help=help, label=label, values=values or ("",), like=like)


def _gauge(name: str, help: str, label: str = "", *values: str) -> Family:
    return Family(name=name, kind=Kind.GAUGE, help=help, label=label, values=values or ("",))


def _histogram(name: str, help: str, buckets: tuple[float, ...], like: Family | None = None) -> Family:
    return Family(name=name, kind=Kind.HISTOGRAM, help=help, buckets=buckets, like=like)


_STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_E2E = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0)
# vLLM's.
_VLLM_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)  # fmt: skip
_VLLM_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_VLLM_E2E = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_VLLM_TOKENS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))
_VLLM_N = (1.0, 2.0, 5.0, 10.0, 20.0)

RUNNING = _gauge("tandem_requests_running", "requests that have a row in the worker")
WAITING = _gauge("tandem_requests_waiting", "requests that wait for a row, in the router or in the worker")
PAUSED = _gauge("tandem_requests_paused", "requests that gave back their KV memory and wait to go on")
KV_TOKENS = _gauge(
    "tandem_kv_tokens",
    "tokens of KV memory: `used` by running requests, `cached` for prefixes and free to be taken, `free`",
    *("state", "used", "cached", "free"),
)
PREFIX_HITS = _counter("tandem_prefix_hit_tokens_total", "prompt tokens found in the prefix cache")
PROMPT_TOKENS = _counter("tandem_prompt_tokens_total", "prompt tokens, found or computed, counted at the first token")
GENERATION_TOKENS = _counter("tandem_generation_tokens_total", "output tokens, counted as they come")
FINISHED = _counter(
    "tandem_requests_finished_total",
    "requests that ended after they were accepted: `stop` is an end token or a stop string, `abort` a client that "
    "went or a model that was unloaded",
    *("reason", "stop", "length", "abort", "deadline", "error"),
)
REFUSED = _counter(
    "tandem_requests_refused_total",
    "requests that were not accepted: too many wait, no memory for their tokens, a mistake of the client's, or the "
    "model is being unloaded",
    *("reason", "queue_full", "arena_full", "invalid", "unloading"),
)
READY = _gauge("tandem_workers_ready", "workers that compute; 0 while the only one is being replaced")
RESTARTS = _counter("tandem_worker_restarts_total", "workers that were started because the one before had ended")
PAUSES = _counter("tandem_pauses_total", "times a request was paused because KV memory ran out")
RECOMPUTED = _counter("tandem_recomputed_tokens_total", "tokens computed again when paused requests went on")
STEP_SECONDS = _histogram(
    "tandem_step_seconds",
    "mean step of the loop, observed once a second, while requests ran at both ends of that second",
    _STEP,
)
TTFT = _histogram(
    "tandem_time_to_first_token_seconds",
    "from a request's arrival until the worker has published its first token, observed when the request ends",
    _FIRST_TOKEN,
)
INTER_TOKEN = _histogram(
    "tandem_inter_token_seconds",
    "mean time between two tokens of a request, one observation a request that ended by `stop` or `length`",
    _INTER_TOKEN,
)
QUEUE = _histogram(
    "tandem_queue_seconds", "from a request's arrival to its first row, observed when the request ends", _QUEUE
)
E2E = _histogram(
    "tandem_e2e_seconds",
    "from a request's arrival to its last response, of requests that ended by `stop` or `length`",
    _E2E,
)
VLLM_PROMPT_LEN = _histogram("vllm:request_prompt_tokens", "prompt tokens of a request", _VLLM_TOKENS)
VLLM_OUTPUT_LEN = _histogram("vllm:request_generation_tokens", "output tokens of a request", _VLLM_TOKENS)
VLLM_N = _histogram("vllm:request_params_n", "the request field `n`", _VLLM_N)
TRT_KV = _gauge(
    "nv_trt_llm_kv_cache_block_metrics",
    "KV memory as tensorrtllm_backend reports it, for Triton's ORCA load report; a block is one token; `reused` counts "
    "prefix hits",
    *("kv_cache_block_type", "max", "free", "used", "tokens_per", "reused", "fraction"),
)

FAMILIES: tuple[Family, ...] = (
    *(RUNNING, WAITING, PAUSED, KV_TOKENS, READY),
    *(PROMPT_TOKENS, PREFIX_HITS, GENERATION_TOKENS, FINISHED, REFUSED, RESTARTS, PAUSES, RECOMPUTED),
    *(TTFT, INTER_TOKEN, QUEUE, E2E, STEP_SECONDS),
    _counter("vllm:prompt_tokens_total", "as vllm_backend names it", like=PROMPT_TOKENS),
    _counter("vllm:generation_tokens_total", "as vllm_backend names it", like=GENERATION_TOKENS),
    _histogram("vllm:time_to_first_token_seconds", "as vllm_backend names it", _VLLM_FIRST_TOKEN, TTFT),
    _histogram(
        "vllm:time_per_output_token_seconds",
        "as vllm_backend names it, which observes every token; here the mean of a request",
        _VLLM_PER_TOKEN,
        INTER_TOKEN,
    ),
    _histogram("vllm:e2e_request_latency_seconds", "as vllm_backend names it", _VLLM_E2E, E2E),
    *(VLLM_PROMPT_LEN, VLLM_OUTPUT_LEN, VLLM_N, TRT_KV),
)


class Metrics:
    """Counters and gauges as they are now, and observations not written yet. Any thread may call anything.

    It outlives workers, so counters do not fall when one dies. Nothing here talks to Triton.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {
            Series(family.name, value): 0.0
            for family in FAMILIES
            if family.kind is not Kind.HISTOGRAM and family.like is None
            for value in family.values
        }
        self._observations: deque[tuple[Family, float]] = deque(maxlen=MAX_OBSERVATIONS)
        self._changed = threading.Event()

    def count(self, family: Family, by: float = 1, value: str = "") -> None:
        if not by:
            return
        series = Series(family.name, value)
        with self._lock:
            self._values[series] += by
        self.touch()

    def set(self, family: Family, number: float, value: str = "") -> None:
        with self._lock:
            self._values[Series(family.name, value)] = number

    def observe(self, family: Family, number: float) -> None:
        self._observations.append((family, number))
        self.touch()

    def get(self, family: Family, value: str = "") -> float:
        return self._values[Series(family.name, value)]

    def snapshot(self) -> dict[Series, float]:
        with self._lock:
            return dict(self._values)

    def next_observation(self) -> tuple[Family, float] | None:
        try:
            return self._observations.popleft()
        except IndexError:
            return None

    def touch(self) -> None:
        """Something may be worth a push."""
        if not self._changed.is_set():  # setting takes a lock, looking does not
            self._changed.set()

    def wait(self, timeout: float | None) -> None:
        """Until something may be worth a push, or time is up."""
        self._changed.wait(timeout)
        self._changed.clear()


def metrics_table() -> str:
    """The metrics as a Markdown table, for docs/metrics.md."""
    rows = ["| name | kind | own label | meaning |", "| --- | --- | --- | --- |"]
    for family in FAMILIES:
        label = f"`{family.label}`: {', '.join(family.values)}" if family.label else ""
        text = family.help + (f"; the values of `{family.like.name}`" if family.like else "")
        rows.append(f"| `{family.name}` | {family.kind.value} | {label} | {text} |")
    return "\n".join(rows)
