"""What /metrics and the log say of a served model, and whether the dashboard asks for what is there."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from backend_lib.router.metrics import FAMILIES, Kind
from tests.support.clients import TIMEOUT, HttpClient, grpc_stream
from tests.support.hashing import ENDLESS, GREEDY, PROMPT, answer
from tests.support.metrics import Scrape, selectors, wait_metrics
from tests.support.server import RunningServer, running_server

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docker/grafana-dashboard.json").read_text())
PROMETHEUS_YML = (ROOT / "docker/prometheus.yml").read_text()
KV = "tandem_kv_tokens"
SETTINGS = {"max_running": 2, "queue_size": 2, "kv_tokens": 60_000, "drain_seconds": 1}


@pytest.fixture(scope="module")
def measured(hash_checkpoint: Path) -> Iterator[RunningServer]:
    """A server of this file's own, so that its counts are known."""
    with running_server(model=hash_checkpoint, settings=SETTINGS, repository_mode="explicit") as running:
        wait_shown(running)
        yield running


@pytest.fixture
def client(measured: RunningServer) -> HttpClient:
    return HttpClient(measured.http_url)


def wait_shown(server: RunningServer) -> Scrape:
    return wait_metrics(server.metrics_url, lambda each: any(sample.value for sample in each.find(KV, state="free")))


def scrape_until(server: RunningServer, name: str, value: float, **labels: str) -> Scrape:
    return wait_metrics(server.metrics_url, lambda scrape: scrape.get(name, **labels) == value)


def request_lines(server: RunningServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.splitlines() if line.startswith('{"request"')]


def test_every_metric_is_there_from_the_start_with_its_labels(measured):
    scrape = Scrape.of(measured.metrics_url)
    for family in FAMILIES:
        assert f"# TYPE {family.name} {family.kind.value}" in scrape.text
        samples = scrape.find(family.name + ("_count" if family.kind is Kind.HISTOGRAM else ""))
        assert {sample.labels.get(family.label or "none", "") for sample in samples} == set(family.values)
        assert all(sample.labels.items() >= {"model": "llm", "version": "1"}.items() for sample in samples)


def test_a_request_is_counted_and_timed(measured, client):
    before = Scrape.of(measured.metrics_url)
    client.generate(PROMPT, max_tokens=40, id="counted", **GREEDY)
    done = before.get("tandem_requests_finished_total", reason="length") + 1
    scrape = scrape_until(measured, "tandem_requests_finished_total", done, reason="length")
    for name, by in {
        "tandem_prompt_tokens_total": 3,
        "tandem_generation_tokens_total": 40,
        "vllm:prompt_tokens_total": 3,
        "vllm:generation_tokens_total": 40,
        "tandem_queue_seconds_count": 1,
        "tandem_time_to_first_token_seconds_count": 1,
        "tandem_inter_token_seconds_count": 1,
        "tandem_e2e_seconds_count": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:request_generation_tokens_sum": 40,
        "vllm:request_params_n_sum": 1,
    }.items():
        assert scrape.get(name) - before.get(name) == by, name
    stages = [
        scrape.get(f"tandem_{name}_seconds_sum") - before.get(f"tandem_{name}_seconds_sum")
        for name in ("queue", "time_to_first_token", "e2e")
    ]
    assert 0 < stages[0] <= stages[1] < stages[2] < 5
    (line,) = [each for each in request_lines(measured) if each["request"] == "counted"]
    assert line.items() >= {"finish": "length", "input_tokens": 3, "output_tokens": 40}.items()
    assert line["queue_ms"] <= line["ttft_ms"] < line["e2e_ms"]


def test_running_and_waiting_requests_and_their_memory_are_shown(measured, client):
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(grpc_stream(measured.grpc_url)) for _ in range(5)]
        for stream in streams[:4]:
            stream.send(PROMPT, stream=True, parameters=ENDLESS | {"max_tokens": 25_000})
            time.sleep(0.1)
        busy = wait_metrics(
            measured.metrics_url,
            lambda scrape: scrape.get("tandem_requests_running") == scrape.get("tandem_requests_waiting") == 2,
        )
        assert "the queue is full" in streams[4].error(PROMPT)
        assert sum(busy.get("tandem_kv_tokens", state=state) for state in ("used", "cached", "free")) == 60_000
        assert busy.get("tandem_kv_tokens", state="used") > 2
        scrape_until(measured, "tandem_requests_refused_total", 1, reason="queue_full")
        tokens = busy.get("tandem_generation_tokens_total")
        wait_metrics(measured.metrics_url, lambda each: each.get("tandem_generation_tokens_total") > tokens)
        wait_metrics(measured.metrics_url, lambda each: each.get("tandem_step_seconds_count") > 0)
    scrape = scrape_until(measured, "tandem_requests_finished_total", 4, reason="abort")
    scrape = scrape_until(measured, "tandem_kv_tokens", 0, state="used")
    assert scrape.get("tandem_requests_running") == scrape.get("tandem_requests_waiting") == 0
    assert 0 < scrape.get("tandem_step_seconds_sum") / scrape.get("tandem_step_seconds_count") < 0.5


def test_errors_are_counted_and_logged_without_their_text(measured, client):
    secret = "秘密" * 3
    assert client.error(PROMPT + secret, max_tokens=0, id="invalid")[0] == 400
    with grpc_stream(measured.grpc_url) as stream:
        assert "timeout" in stream.ask(PROMPT, stream=True, timeout_us=50_000, parameters=ENDLESS)[-1].error
    client.generate(PROMPT, max_tokens=8, id="stopped", stop=answer(1), **GREEDY)
    scrape = scrape_until(measured, "tandem_requests_finished_total", 1, reason="stop")
    assert scrape.get("tandem_requests_finished_total", reason="deadline") == 1
    assert scrape.get("tandem_requests_refused_total", reason="invalid") == 1
    lines = {line["request"]: line for line in request_lines(measured)}
    assert lines["invalid"] == {
        "request": "invalid",
        "finish": "refused",
        "error": "INVALID_ARG",
        "refused": "invalid",
    }
    assert lines["stopped"]["finish"] == "stop"
    assert any(line["finish"] == "deadline" and line["error"] == "UNAVAILABLE" for line in lines.values())
    log = measured.log
    for text in (secret, PROMPT, answer(1)):
        assert text not in log and json.dumps(text)[1:-1] not in log


def orca(text: str) -> dict[str, float]:
    """What Triton's load report reads of the metrics' text: it takes whole and decimal numbers only."""
    found = re.findall(r"nv_trt_llm_kv_cache_block_metrics(?:{(.*?)})?\s*(\d+(?:\.\d+)?)", text)
    blocks = {re.search(r'kv_cache_block_type="(\w+)"', labels).group(1): float(value) for labels, value in found}
    return {
        "named_metrics.kv_cache_utilization": blocks["used"] / blocks["max"],
        "named_metrics.max_token_capacity": blocks["max"] * blocks["tokens_per"],
    }


def test_triton_can_report_the_load(measured):
    answered = requests.post(
        f"{measured.http_url}/v2/models/llm/generate",
        json={"text_input": PROMPT, "max_tokens": 2},
        headers={"endpoint-load-metrics-format": "text"},
        timeout=TIMEOUT,
    )
    load = orca(Scrape.of(measured.metrics_url).text)
    assert load["named_metrics.max_token_capacity"] == 60_000
    # The library that writes the header has this name in it; releases up to 24.10 do not.
    if b"nv_trt_llm_kv_cache_block_metrics" in measured.process.plan.server.binary.read_bytes():
        header = answered.headers["endpoint-load-metrics"]
        assert header.startswith("TEXT ")
        fields = dict(field.split("=") for field in header.removeprefix("TEXT ").split(", "))
        assert {name: float(value) for name, value in fields.items()} == pytest.approx(load, abs=1e-3)


def test_counters_survive_the_death_of_a_worker(measured, client):
    client.generate(PROMPT, max_tokens=5, **GREEDY)
    time.sleep(1.2)
    before = Scrape.of(measured.metrics_url)
    (worker,) = measured.worker_pids
    with grpc_stream(measured.grpc_url) as stream:
        stream.send(PROMPT, stream=True, request_id="survivor", parameters=ENDLESS | {"max_tokens": 5000})
        stream.next()
        os.kill(worker, signal.SIGKILL)
        assert stream.rest()[-1].final
    restarts = before.get("tandem_worker_restarts_total") + 1
    scrape = scrape_until(measured, "tandem_worker_restarts_total", restarts)
    scrape_until(measured, "tandem_workers_ready", 1)
    done = before.get("tandem_requests_finished_total", reason="length") + 1
    scrape = scrape_until(measured, "tandem_requests_finished_total", done, reason="length")
    assert scrape.get("tandem_generation_tokens_total") == before.get("tandem_generation_tokens_total") + 5000
    assert scrape.get("tandem_prompt_tokens_total") == before.get("tandem_prompt_tokens_total") + 3
    (line,) = [each for each in request_lines(measured) if each["request"] == "survivor"]
    assert line["queue_ms"] <= line["ttft_ms"] < line["e2e_ms"] / 2, "from the first worker, not the second"


# The dashboard.

PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}


def plain(query: str) -> str:
    """A query with Grafana's variables filled in."""
    filled = query.replace("$__rate_interval", "1m").replace("$model", ".*")
    assert "$" not in filled, query
    return filled


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_a_panel_asks_for_what_is_there(measured, panel):
    scrape = Scrape.of(measured.metrics_url)
    assert panel["fieldConfig"]["defaults"]["unit"] and panel["description"]
    for target in panel["targets"]:
        assert target["legendFormat"]
        asked = list(selectors(plain(target["expr"])))
        assert asked
        labels: set[str] = set()
        for selector in asked:
            found = [sample for sample in scrape.samples if selector.matches(sample)]
            assert found, selector
            labels |= found[0].labels.keys()
        used = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        by = {name for each in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in each.split(", ")}
        assert by <= labels and used <= by


def test_the_dashboard_shows_every_metric_of_ours():
    asked = " ".join(target["expr"] for panel in PANELS.values() for target in panel["targets"])
    ours = [family.name for family in FAMILIES if family.name.startswith("tandem_")]
    assert [name for name in ours if name not in asked] == []


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("prometheus"), reason="no prometheus (Debian has one: apt-get install prometheus)")
def test_prometheus_answers_every_query_of_the_dashboard(measured, client, tmp_path):
    port = _free_port()
    config = tmp_path / "prometheus.yml"
    target = measured.metrics_url.removeprefix("http://").removesuffix("/metrics")
    assert "localhost:8002" in PROMETHEUS_YML
    config.write_text(re.sub(r"_interval: 5s", "_interval: 1s", PROMETHEUS_YML).replace("localhost:8002", target))
    command = [
        *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as prometheus:
        try:
            started = time.monotonic()
            while time.monotonic() < started + 12:
                client.generate(PROMPT, max_tokens=200, **GREEDY)
            for panel in PANELS.values():
                for asked in panel["targets"]:
                    _check_answer(port, panel["title"], plain(asked["expr"]))
        finally:
            prometheus.terminate()


def _check_answer(port: int, title: str, query: str) -> None:
    answered = requests.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query}, timeout=10).json()
    assert answered["status"] == "success", (title, query, answered)
    values = [float(series["value"][1]) for series in answered["data"]["result"]]
    assert values and all(value >= 0 for value in values), (title, query, answered)  # NaN is not


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def kv_tokens(scrape: Scrape) -> float:
    """What the KV cache holds in all."""
    return sum(scrape.get(KV, state=state) for state in ("used", "cached", "free"))


# Last: these load and unload the model.


def test_unloading_takes_the_metrics_along_and_loading_brings_them_back(measured, client):
    for _ in range(2):
        client.generate(PROMPT, max_tokens=3, **GREEDY)
        assert client.unload().status_code == 200
        client.wait_unloaded()
        assert not Scrape.of(measured.metrics_url).find("tandem_requests_running")
        assert client.load().status_code == 200
        assert wait_shown(measured).get(KV, state="free") == 60_000
    assert "Traceback" not in measured.log


def test_a_model_reloaded_in_place_keeps_its_metrics(measured, client):
    """Triton loads the new one first, and the old one's end must not take the metrics of the new one along."""
    config = client.config()
    config["parameters"]["kv_tokens"] = {"string_value": "50000"}
    with grpc_stream(measured.grpc_url) as stream:
        stream.send(PROMPT, stream=True, parameters=ENDLESS)
        stream.next()
        assert client.load(config).status_code == 200
        client.generate(PROMPT, max_tokens=3, **GREEDY)
        assert len(measured.stub_pids) == 2
        assert kv_tokens(Scrape.of(measured.metrics_url)) == 60_000, "the old one's"
    wait_metrics(measured.metrics_url, lambda each: bool(each.find(KV)) and kv_tokens(each) == 50_000)
    client.generate(PROMPT, max_tokens=4, **GREEDY)
    scrape_until(measured, "tandem_generation_tokens_total", 7)
    assert "Traceback" not in measured.log


def test_a_server_without_metrics_serves_and_logs(hash_checkpoint):
    with running_server(model=hash_checkpoint, extra_flags=["--allow-metrics=false"]) as server:
        client = HttpClient(server.http_url)
        assert client.generate(PROMPT, max_tokens=4, id="seen", **GREEDY)["text_output"] == PROMPT + answer(4)
        deadline = time.monotonic() + 10
        while [line["request"] for line in request_lines(server)] != ["seen"]:  # it is written after the answer
            assert time.monotonic() < deadline
            time.sleep(0.02)
