"""What the README tells a newcomer to type works as it stands there, but for the ports."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.documents import ROOT, for_server, run

README = (ROOT / "README.md").read_text()


def test_the_curl_line_streams_paris(server):
    command = re.search(r"^    (curl -N .*?}')$", README, re.DOTALL | re.MULTILINE).group(1)
    lines = [line for line in run(for_server(command, server)).splitlines() if line]
    assert '"text_output":" Paris' in lines[0]  # what has come meanwhile is sent with it
    assert len(lines) > 4
    assert '"text_output":" Paris"' in README


def test_the_python_client_prints_a_story(server):
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    story = run([sys.executable, "-c", for_server(code, server)])
    assert len(story.split()) > 8


@pytest.mark.parametrize("path", re.findall(r"\]\(([\w./]+)\)", README))
def test_what_it_links_to_is_there(path):
    assert (ROOT / path).exists()


def test_the_makefile_has_the_two_commands():
    for target in ("serve", "test"):
        assert "setup" in run(["make", "--dry-run", "--always-make", target])


def test_the_measuring_tool_runs(server):
    command = re.search(r"`python (benchmarks/serve\.py .*?)`", README).group(1)
    table = run([sys.executable, *command.split(), "--url", server.grpc_url, "--requests", "2", "--output-tokens", "4"])
    assert [line.split()[:3] for line in table.splitlines()] == [
        ["concurrency", "requests", "failed"], ["1", "2", "0"], ["8", "2", "0"],
    ]  # fmt: skip
