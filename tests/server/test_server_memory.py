"""Memory of a server over many responses, and how little shared memory it needs."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.support.clients import HttpClient
from tests.support.hashing import GREEDY, PROMPT, answer, text_of
from tests.support.serve import COMMAND, ROOT, tandem_serve
from tests.support.server import RunningServer

MIB = 1 << 20
CONTAINERS_SHM = 64 * MIB  # what Docker gives a container that asks for nothing


@pytest.mark.parametrize("responses", [5_000, pytest.param(100_000, marks=pytest.mark.long)])
def test_memory_does_not_grow_with_responses(hash_server, http, responses):
    """Of tritonserver, router and worker; one response a token, and what the first ones take is not counted."""
    _stream_tokens(http, 3_000)
    before = _memory(hash_server)
    _stream_tokens(http, responses)
    after = _memory(hash_server)
    print(before, after, sep="\n")
    assert after["shared"] == before["shared"]
    for name in ("tritonserver", "router", "worker"):
        assert after[name] - before[name] < 8 * MIB, name


def _stream_tokens(client: HttpClient, responses: int) -> None:
    """That many in streams side by side, each of 500 responses or, where they pile up, a few less."""

    def stream(_: int) -> int:
        return sum(1 for _ in client.stream(PROMPT, max_tokens=500, **GREEDY))

    came = 0
    with ThreadPoolExecutor(6) as clients:
        while came < responses:
            came += sum(clients.map(stream, range(6)))


def _memory(server: RunningServer) -> dict[str, int]:
    """Bytes: what each process holds besides what it shares with files, and the regions in /dev/shm."""
    pids = {"tritonserver": server.pid, "router": server.stub_pid, "worker": server.worker_pids[0]}
    held = {name: psutil.Process(pid).memory_info() for name, pid in pids.items()}
    return {name: info.rss - info.shared for name, info in held.items()} | {"shared": _regions(server)}


def _regions(server: RunningServer) -> int:
    return sum(path.stat().st_size for path in Path("/dev/shm").glob(f"{server.process.shm_prefix}*"))


def test_the_dev_shm_of_a_container_is_enough(hash_server, http):
    """Triton's own region grows with prompts and answers in flight; all that is ours lies in a block without a name."""
    text = text_of([3 + number % 900 for number in range(40_000)])
    with ThreadPoolExecutor(16) as clients:
        answers = clients.map(lambda _: http.generate(text, max_tokens=1, **GREEDY)["text_output"], range(32))
        assert all(each.startswith(text) for each in answers)
    assert _regions(hash_server) < CONTAINERS_SHM
    maps = Path(f"/proc/{hash_server.stub_pid}/maps").read_text().splitlines()
    assert any("memfd:" in line for line in maps)
    named = {line.split()[5] for line in maps if "/dev/shm/" in line}
    assert all(Path(path).name.startswith(hash_server.process.shm_prefix) for path in named)


_IN_ONE_MIB = ("unshare", "--map-root-user", "--mount", "sh", "-c")
_MOUNT = "mount -t tmpfs -o size=1m tmpfs /dev/shm"


@pytest.mark.long
def test_a_dev_shm_of_one_megabyte(tmp_path, hash_checkpoint, monkeypatch):
    """Enough for all but very long prompts; one that Triton has no room for is that client's error."""
    if subprocess.run([*_IN_ONE_MIB, _MOUNT], capture_output=True).returncode:
        pytest.skip("no mounts of our own on this machine")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [*_IN_ONE_MIB, f'{_MOUNT} && exec "$@"', "sh", *COMMAND, "--model", str(hash_checkpoint)]
    with tandem_serve(tmp_path, command=command) as served:
        client = HttpClient(served.url.partition("/v2/")[0])
        with ThreadPoolExecutor(8) as clients:
            streams = clients.map(lambda _: list(client.stream(PROMPT, max_tokens=200, **GREEDY)), range(16))
            texts = ["".join(piece["text_output"] for piece in pieces) for pieces in streams]
        assert texts == [answer(200)] * 16
        assert "Failed to increase the shared memory pool size" in client.error("丅" * 700_000)[1]
        assert client.generate(PROMPT, max_tokens=3, **GREEDY)["text_output"] == PROMPT + answer(3)
