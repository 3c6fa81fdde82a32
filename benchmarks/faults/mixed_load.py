"""Clients that ask for one thing after another: streams, draws, several sequences, and requests that end early."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.serving.client import LoadClient, Trace
from benchmarks.serving.progress import Progress
from benchmarks.serving.workload import LoadRequest, Workload

TIMED_OUT = "timeout of"  # in the words of a deadline's error
SHORT = (0.05, 2.0)  # seconds until a client goes away or a deadline passes
TIMEOUT = 600.0


@dataclass
class Tally:
    """What came of the requests since the last look. Times are seconds of `time.perf_counter`."""

    answered: Counter[str] = field(default_factory=Counter)  # by kind
    errors: Counter[str] = field(default_factory=Counter)  # those that nobody asked for, by message
    ttft: list[float] = field(default_factory=list)  # seconds
    inter_token: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self, trace: Trace) -> None:
        self.ttft.append(trace.ttft)
        self.inter_token += trace.inter_token
        self.tokens += sum(trace.tokens)


class MixedLoad:
    """So many clients at a time. `tally` is the reader's to take and replace."""

    def __init__(self, grpc: LoadClient, http_url: str, workload: Workload, seed: int) -> None:
        self._grpc, self._workload = grpc, workload
        self._url = f"{http_url}/v2/models/llm/generate_stream"
        self._rng = random.Random(seed)
        self._number = 0
        self.tally = Tally()

    async def run(self, clients: int, seconds: float) -> None:
        """Ask for so long, and then wait for what is under way."""
        until = time.perf_counter() + seconds
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT)) as http:
            await asyncio.gather(*(self._client(http, until) for _ in range(clients)))

    async def _client(self, http: aiohttp.ClientSession, until: float) -> None:
        kinds: dict[str, Callable[[aiohttp.ClientSession, LoadRequest], Awaitable[str]]] = {
            "stream": self._stream, "draw": self._draw, "siblings": self._siblings, "cancel": self._cancel,
            "http": self._http, "leave": self._leave, "deadline": self._deadline, "mistake": self._mistake,
        }  # fmt: skip
        weights = [6, 4, 1, 1, 2, 1, 1, 1]
        while time.perf_counter() < until:
            (kind,) = self._rng.choices(list(kinds), weights)
            self._number += 1
            try:
                error = await kinds[kind](http, self._workload.request("soak", self._number))
            except (aiohttp.ClientError, OSError, TimeoutError) as failure:
                error = f"{type(failure).__name__}: {failure}"
            self.tally.answered[kind] += 1
            if error:
                self.tally.errors[f"{kind}: {error}"] += 1

    async def _ask(self, request: LoadRequest, **sampling: Any) -> Trace:
        progress = Progress("soak", None, None)
        return await self._grpc.ask(
            LoadRequest(request.text, {**request.sampling, **sampling}), time.perf_counter(), progress
        )

    async def _timed(self, request: LoadRequest, **sampling: Any) -> str:
        trace = await self._ask(request, **sampling)
        if not trace.error:
            self.tally.add(trace)
        return trace.error

    async def _stream(self, http: aiohttp.ClientSession, request: LoadRequest) -> str:
        return await self._timed(request, request_priority=self._rng.randint(-1, 1))

    async def _draw(self, http: aiohttp.ClientSession, request: LoadRequest) -> str:
        return await self._timed(request, temperature=0.8, seed=self._rng.getrandbits(63))

    async def _siblings(self, http: aiohttp.ClientSession, request: LoadRequest) -> str:
        return (await self._ask(request, n=2, temperature=0.8)).error

    async def _cancel(self, http: aiohttp.ClientSession, request: LoadRequest) -> str:
        """What it had to say by then does not matter, but for an error."""
        asked = asyncio.create_task(self._ask(request))
        done, _ = await asyncio.wait([asked], timeout=self._rng.uniform(*SHORT))
        if done:
            return asked.result().error
        asked.cancel()
        await asyncio.wait([asked])
        return ""

    async def _mistake(self, http: aiohttp.ClientSession, request: LoadRequest) -> str:
        error = (await self._ask(request, max_tokens=0)).error
        return "" if "max_tokens" in error else f"no error of max_tokens but {error!r}"

    async def _http(self, http: aiohttp.ClientSession, request: LoadRequest) -> str:
        async with http.post(self._url, json=_body(request)) as answer:
            return _error(await answer.text())

    async def _leave(self, http: aiohttp.ClientSession, request: LoadRequest) -> str:
        async with http.post(self._url, json=_body(request)) as answer:
            if answer.status != 200:
                return _error(await answer.text())
            await answer.content.readline()
            answer.close()  # with what still comes
        return ""

    async def _deadline(self, http: aiohttp.ClientSession, request: LoadRequest) -> str:
        timeout = int(self._rng.uniform(*SHORT) * 1e6)
        async with http.post(self._url, json=_body(request) | {"timeout": timeout}) as answer:
            error = _error(await answer.text())
        return "" if TIMED_OUT in error else error


def _body(request: LoadRequest) -> dict[str, Any]:
    return {"text_input": request.text, "stream": True, **request.sampling}


def _error(text: str) -> str:
    """The error in the last event of a response body, if there is one."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    try:
        return str(json.loads(lines[-1]).get("error", "")) if lines else "an empty answer"
    except ValueError:
        return f"no JSON: {lines[-1]!r}"
