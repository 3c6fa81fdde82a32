"""Figures of the load tool, worked out by hand from traces with round numbers."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.client import Trace
from benchmarks.serving.load import Level
from benchmarks.serving.progress import Progress
from benchmarks.serving.report import remarks, table, write_json, write_plot
from benchmarks.serving.summary import Percentiles, Summary, summarize


def trace(started: float, times: list[float], tokens: list[int], *, planned: float | None = None, error="") -> Trace:
    planned = started if planned is None else planned
    return Trace(planned, started, times, tokens, input_tokens=10, error=error)


# 100 s is when the level begins. The first has gaps of 0.5 s for one token and 1 s for two; the second of 0.25 s.
FIRST = trace(100.0, [101.0, 101.5, 102.5], [1, 1, 2])
SECOND = trace(100.5, [100.75, 101.0], [1, 1], planned=100.25)
BROKEN = trace(100.0, [101.0], [5], error="too late")


def summary(traces: list[Trace], *, seconds: float | None = None, cpu: float = 0.1, kind: str = "rate") -> Summary:
    return summarize(Level(kind, 2), traces, started=100.0, seconds=seconds, client_cpu=cpu)


def test_latencies_of_a_request():
    assert FIRST.ttft == 1.0
    assert FIRST.end_to_end == 2.5
    assert FIRST.inter_token == [0.5, 0.5, 0.5]
    assert SECOND.inter_token == [0.25]
    assert trace(100.0, [101.0], [1]).inter_token == []


def test_percentiles_are_interpolated():
    assert Percentiles.of([float(value) for value in range(101)]) == Percentiles(50.0, 90.0, 99.0)
    assert Percentiles.of([1.0, 2.0]) == Percentiles(1.5, 1.9, 1.99)
    assert Percentiles.of([7.0]) == Percentiles(7.0, 7.0, 7.0)
    assert Percentiles.of([]) is None


def test_rates_count_until_the_last_answer():
    whole = summary([FIRST, SECOND])
    assert whole.seconds == 2.5
    assert whole.requests_per_s == 2 / 2.5
    assert whole.output_tokens_per_s == 6 / 2.5
    assert whole.total_tokens_per_s == (6 + 20) / 2.5
    assert (whole.mean_input_tokens, whole.mean_output_tokens) == (10, 3)


def test_rates_of_a_duration_leave_out_what_comes_later():
    cut = summary([FIRST, SECOND], seconds=1.25)
    assert cut.seconds == 1.25
    assert cut.requests_per_s == 1 / 1.25
    assert cut.output_tokens_per_s == 3 / 1.25
    assert cut.total_tokens_per_s == (3 + 20) / 1.25
    assert cut.end_to_end_ms == summary([FIRST, SECOND]).end_to_end_ms, "latencies are those of whole answers"


def test_latencies_are_in_milliseconds():
    both = summary([FIRST, SECOND])
    assert both.ttft_ms == Percentiles(625.0, 925.0, 992.5)
    assert both.inter_token_ms.p50 == 500.0
    assert both.end_to_end_ms.p50 == 1500.0
    assert both.send_delay_ms.p50 == 125.0


def test_failed_requests_are_counted_by_message_and_nowhere_else():
    mixed = summary([FIRST, BROKEN, BROKEN, trace(100.0, [], [], error="refused")])
    assert (mixed.requests, mixed.failed) == (4, 3)
    assert mixed.errors == {"too late": 2, "refused": 1}
    alone = summary([FIRST])
    assert mixed.output_tokens_per_s == alone.output_tokens_per_s
    assert mixed.ttft_ms == alone.ttft_ms


def test_nothing_but_failures():
    failed = summary([BROKEN])
    assert (failed.failed, failed.output_tokens_per_s, failed.ttft_ms) == (1, 0, None)
    assert " - " in table([failed])


def test_no_requests_at_all():
    assert summary([], seconds=2.0).requests_per_s == 0


@given(st.lists(st.tuples(st.floats(0.01, 5), st.integers(1, 4)), min_size=1, max_size=20))
def test_inter_token_latencies_add_up(responses):
    gaps, tokens = zip(*responses, strict=True)
    times = [100.0, *(100.0 + np.cumsum(gaps))]
    request = trace(99.0, times, [1, *tokens])
    assert len(request.inter_token) == sum(tokens)
    assert request.ttft + sum(request.inter_token) == pytest.approx(request.end_to_end)


def test_the_table():
    lines = table([summary([FIRST, SECOND]), summary([FIRST], seconds=200.0)]).splitlines()
    assert lines[0].split("  ")[0] == "rate"
    assert "625 / 925 / 992" in lines[1]
    assert "sent late ms" in lines[0]
    assert "sent late ms" not in table([summary([FIRST], kind="concurrency")])
    assert len({line.index("%") for line in lines[1:]}) == 1, "columns are aligned"


def test_a_busy_client_is_said():
    assert remarks([summary([FIRST], cpu=0.5)]) == []
    assert remarks([summary([FIRST], seconds=0.1, cpu=0.95)]) == [], "too short to tell"
    (line,) = remarks([summary([FIRST], cpu=0.95)])
    assert line == "rate 2: the client used 95% of a core; it may be the bottleneck"


def test_json_and_picture(tmp_path):
    write_json(tmp_path / "a.json", {"seed": 1, "json": tmp_path}, [summary([FIRST, SECOND]), summary([BROKEN])])
    read = json.loads((tmp_path / "a.json").read_text())
    assert read["arguments"]["seed"] == 1
    assert read["levels"][0]["ttft_ms"] == {"p50": 625.0, "p90": 925.0, "p99": 992.5}
    assert read["levels"][1]["ttft_ms"] is None
    write_plot(tmp_path / "a.png", [summary([FIRST, SECOND]), summary([BROKEN])])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_nothing_elsewhere():
    for out, is_shown in ((Terminal(), True), (io.StringIO(), False)):
        progress = Progress("rate 2", requests=4, seconds=None, out=out)
        progress.received(8)
        progress.answered()
        progress.close()
        assert bool(out.getvalue()) == is_shown
        assert "\n" not in out.getvalue()


def test_the_bar_follows_answers_or_time():
    counted = Progress("c", requests=4, seconds=None, out=io.StringIO())
    counted.received(6)
    counted.answered()
    assert counted.line(3.0) == f"c [{'#' * 6}{' ' * 18}] 1/4 answers, 2 tokens/s, 3 s"
    assert Progress("c", None, 10.0, io.StringIO()).line(5.0) == f"c [{'#' * 12}{' ' * 12}] 0 answers, 0 tokens/s, 5 s"
