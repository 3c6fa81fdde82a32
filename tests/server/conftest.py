"""The servers that most server tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoints import make_hash_checkpoint
from tests.support.clients import GrpcStream, HttpClient, grpc_stream
from tests.support.server import RunningServer, running_server

LONG_CONTEXT = 1 << 16  # room for streams that do not end by themselves while a test looks at them


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The shipped model repository with its built-in model, served for the whole session."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def hash_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test-only model, whose tokens are known beforehand (`tests.support.hashing`)."""
    return make_hash_checkpoint(tmp_path_factory.mktemp("checkpoints") / "hash", max_position=LONG_CONTEXT)


@pytest.fixture(scope="session")
def hash_server(hash_checkpoint: Path) -> Iterator[RunningServer]:
    """The test-only model, served for the whole session."""
    # Triton keeps a model for ever once gRPC has refused a request to it, or a load has failed: do not wait for that.
    with running_server(model=hash_checkpoint, extra_flags=["--exit-timeout-secs=3"]) as running:
        yield running


@pytest.fixture
def http(hash_server: RunningServer) -> HttpClient:
    """The generate endpoints of the test-only model."""
    return HttpClient(hash_server.http_url)


@pytest.fixture
def grpc(hash_server: RunningServer) -> Iterator[GrpcStream]:
    """An open gRPC stream to the test-only model."""
    with grpc_stream(hash_server.grpc_url) as stream:
        yield stream
