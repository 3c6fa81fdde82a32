"""The server that most server tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.server import RunningServer, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The shipped model repository with its built-in model, served for the whole session."""
    with running_server() as running:
        yield running
