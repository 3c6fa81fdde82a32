"""What is known of a request when it has ended: its line in the log, and what it adds to the metrics."""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

from backend_lib.request import FinishReason
from backend_lib.router.metrics import (
    E2E,
    FINISHED,
    INTER_TOKEN,
    QUEUE,
    REFUSED,
    TTFT,
    VLLM_N,
    VLLM_OUTPUT_LEN,
    VLLM_PROMPT_LEN,
    Metrics,
)
from backend_lib.router.reply import ErrorKind

log = logging.getLogger("tandem.request")

MAX_ID = 128  # characters of a request id, which is the client's to choose

_REASONS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.DEADLINE: "deadline",
    FinishReason.ERROR: "error",
    FinishReason.INVALID: "error",
    FinishReason.GRAMMAR: "stop",
}


class Times(NamedTuple):
    """`time.time_ns()` at a request's stages; 0 for one it did not reach."""

    arrival: int
    scheduled: int = 0
    first_token: int = 0
    last_token: int = 0
    end: int = 0


class Finished(NamedTuple):
    """A request that was accepted and has ended."""

    request_id: str
    finish: FinishReason
    error: ErrorKind | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    times: Times

    @property
    def reason(self) -> str:
        return _REASONS[self.finish]

    @property
    def queue_seconds(self) -> float | None:
        return _seconds(self.times.arrival, self.times.scheduled)

    @property
    def ttft_seconds(self) -> float | None:
        return _seconds(self.times.arrival, self.times.first_token)

    @property
    def e2e_seconds(self) -> float | None:
        return _seconds(self.times.arrival, self.times.end)

    @property
    def inter_token_seconds(self) -> float | None:
        """The mean; None below two tokens."""
        whole = _seconds(self.times.first_token, self.times.last_token)
        return None if whole is None or self.output_tokens < 2 else whole / (self.output_tokens - 1)

    def log(self) -> None:
        """One line of JSON: numbers and the client's id, never text that went in or came out."""
        _log(
            self.request_id, self.reason, self.error, input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens, output_tokens=self.output_tokens,
            queue_ms=_milliseconds(self.queue_seconds), ttft_ms=_milliseconds(self.ttft_seconds),
            e2e_ms=_milliseconds(self.e2e_seconds),
        )  # fmt: skip

    def add_to(self, metrics: Metrics) -> None:
        metrics.count(FINISHED, value=self.reason)
        pairs = [
            (QUEUE, self.queue_seconds), (TTFT, self.ttft_seconds), (VLLM_PROMPT_LEN, self.input_tokens),
            (VLLM_OUTPUT_LEN, self.output_tokens), (VLLM_N, 1),
        ]  # fmt: skip
        if self.error is None:  # the other ends say nothing of the server's speed
            pairs += [(INTER_TOKEN, self.inter_token_seconds), (E2E, self.e2e_seconds)]
        for family, number in pairs:
            if number is not None:
                metrics.observe(family, number)


def refused(metrics: Metrics, request_id: str, reason: str, kind: ErrorKind) -> None:
    """A request that was not accepted."""
    _log(request_id, "refused", kind, refused=reason)
    metrics.count(REFUSED, value=reason)


def failed(metrics: Metrics, request_id: str) -> None:
    """A request that could not be prepared through no fault of the client's."""
    _log(request_id, "error", ErrorKind.INTERNAL)
    metrics.count(FINISHED, value="error")


def _log(request_id: str, finish: str, error: ErrorKind | None, **more: Any) -> None:
    known = {"error": error.value if error else None, **more}
    line = {"request": request_id[:MAX_ID], "finish": finish, **{k: v for k, v in known.items() if v is not None}}
    log.info("%s", json.dumps(line))


def _seconds(start: int, end: int) -> float | None:
    """None when either was not reached. The clock may have been set back meanwhile."""
    return max(0, end - start) / 1e9 if start and end else None


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
