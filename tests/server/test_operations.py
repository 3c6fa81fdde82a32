"""The health checks of docs/operations.md tell the truth, in good days and bad ones."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from tests.support.clients import HttpClient
from tests.support.documents import commands, for_server, run
from tests.support.hashing import GREEDY, PROMPT, answer
from tests.support.metrics import wait_metrics
from tests.support.server import running_server

CHECKS = commands("docs/operations.md", "curl")


@pytest.mark.parametrize("command", CHECKS, ids=["ready", "workers", "deep"])
def test_a_health_check_passes(server, command):
    shown = run(for_server(command, server))
    assert "tandem_workers_ready" not in command or 'tandem_workers_ready{model="llm",version="1"} 1' in shown


@pytest.mark.long
def test_a_model_whose_worker_cannot_start_says_so_and_comes_back(hash_checkpoint, tmp_path):
    folder = shutil.copytree(hash_checkpoint, tmp_path / "hash")
    with running_server(model=folder) as server:
        http = HttpClient(server.http_url)
        (folder / "config.json").rename(folder / "hidden")
        os.kill(*server.worker_pids, signal.SIGKILL)
        wait_metrics(server.metrics_url, lambda scrape: scrape.get("tandem_workers_ready") == 0)
        assert "the model cannot be loaded" in http.error(PROMPT, **GREEDY)[1]
        (folder / "hidden").rename(folder / "config.json")
        wait_metrics(server.metrics_url, lambda scrape: scrape.get("tandem_workers_ready") == 1, timeout=60)
        assert http.generate(PROMPT, max_tokens=9, **GREEDY)["text_output"] == PROMPT + answer(9)
