"""Engines that are servers with OpenAI's `/v1/completions`, asked with token ids and read as streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

from benchmarks.rivals.memory import Memory, memory_of
from benchmarks.rivals.sessions import Child, Command, Deadline, EngineError, child
from benchmarks.rivals.waves import Answer, Prompt

_open = build_opener(ProxyHandler({})).open  # the server is on this machine
_POLL_SECONDS = 0.05
_EVENT = b"data: {"


class HttpSession:
    def __init__(self, process: Child, url: str, model: str, deadline: Deadline) -> None:
        self._process, self._url, self._model, self._deadline = process, url, model, deadline
        self.versions: Mapping[str, str] = {}
        self.command = process.command
        while not _answers(f"{url}/health"):
            process.check()
            deadline.left()
            time.sleep(_POLL_SECONDS)

    def wave(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
        try:
            return asyncio.run(asyncio.wait_for(self._wave(prompts, tokens), self._deadline.left()))
        except asyncio.TimeoutError:
            self._deadline.left()
            raise EngineError("no answer") from None

    def memory(self) -> Memory:
        return memory_of(self._process.popen.pid)

    async def _wave(self, prompts: Sequence[Prompt], tokens: int) -> list[Answer]:
        import aiohttp

        try:
            async with aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            ) as client:
                started = time.perf_counter()
                return await asyncio.gather(*(self._ask(client, prompt, tokens, started) for prompt in prompts))
        except aiohttp.ClientError as error:
            self._process.check()
            raise EngineError(f"{type(error).__name__}: {error}") from None

    async def _ask(self, client: Any, prompt: Prompt, tokens: int, started: float) -> Answer:
        body = {
            "model": self._model, "prompt": prompt.ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        reader = EventReader()
        async with client.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise EngineError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                reader.read(line, time.perf_counter() - started)
        return reader.answer()


class EventReader:
    """Lines of a stream of events. Each event brings a token, but for one that only says why the answer ended."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._usage: int | None = None

    def read(self, line: bytes, now: float) -> None:
        if not line.startswith(_EVENT):
            return
        event = json.loads(line.removeprefix(b"data: "))
        if event.get("error"):
            raise EngineError(str(event["error"])[:300])
        if event.get("usage"):
            self._usage = event["usage"]["completion_tokens"]
        if event.get("choices"):
            self._times.append(now)

    def answer(self) -> Answer:
        """The server's own count decides; text that waits for the rest of a character makes one event of two tokens.

        Raises EngineError when the stream ended before the count came.
        """
        if not self._usage or not self._times:
            raise EngineError("the stream ended without an answer")
        times = self._times[: self._usage]
        return Answer(times, [*[1] * (len(times) - 1), self._usage - len(times) + 1])


@contextlib.contextmanager
def http_server(
    command: Command, port: int, model: str, log: Path, environment: Mapping[str, str], deadline: Deadline
) -> Iterator[HttpSession]:
    with child(command, log, environment) as process:
        yield HttpSession(process, f"http://127.0.0.1:{port}", model, deadline)


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(url: str) -> bool:
    try:
        with _open(url, timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False
