"""Two ranks that share the weights behind a real server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.support.clients import HttpClient, grpc_stream
from tests.support.hashing import GREEDY, PROMPT, answer
from tests.support.processes import wait_ended
from tests.support.server import running_server

RANKS = {"tensor_parallel": 2, "max_running": 8, "debug": "on", "drain_seconds": 1}


def test_two_ranks_are_one_model(hash_checkpoint: Path) -> None:
    """Over HTTP and gRPC, through the death of a rank, until it is unloaded."""
    with running_server(model=hash_checkpoint, settings=RANKS, repository_mode="explicit") as server:
        client = HttpClient(server.http_url)
        assert client.generate(PROMPT, max_tokens=30, **GREEDY)["text_output"] == PROMPT + answer(30)
        with grpc_stream(server.grpc_url) as stream:
            stream.send(PROMPT, stream=True, parameters={"max_tokens": 600, **GREEDY})
            text = stream.next().text
            os.kill(max(server.worker_pids), signal.SIGKILL)
            text += "".join(each.text for each in stream.rest())
            stream.close()
        assert text == answer(600)
        workers = [psutil.Process(pid) for pid in server.worker_pids]
        assert len(workers) == 2
        assert client.unload().status_code == 200
        client.wait_unloaded()
        assert wait_ended(workers, 5) == []
