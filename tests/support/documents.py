"""What a document tells its reader to type, made to fit a server on other ports."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.support.server import RunningServer

ROOT = Path(__file__).parents[2]


def commands(document: str, first_word: str) -> list[str]:
    """The indented lines of a document that begin with a word."""
    return re.findall(rf"^    ({first_word} .*)$", (ROOT / document).read_text(), re.MULTILINE)


def for_server(text: str, server: RunningServer) -> str:
    http, metrics = server.http_url.removeprefix("http://"), server.metrics_url.split("/")[2]
    doors = {"localhost:8000": http, "localhost:8001": server.grpc_url, "localhost:8002": metrics}
    for written, actual in doors.items():
        text = text.replace(written, actual)
    return text


def run(command: list[str] | str) -> str:
    """What it prints. A string is for a shell."""
    done = subprocess.run(
        command, shell=isinstance(command, str), capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
