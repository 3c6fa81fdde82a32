"""Nothing that a client sends or does harms another client, the router, the worker or tritonserver.

Requests are drawn from a seed (`tests.support.fuzz`) and sent while witnesses, whose tokens are known, run beside them.
A failure names the seed and the case: `Draw("seed/case")` draws it again. What tritonserver itself cannot take is not
drawn; each such place in `tests.support.fuzz_http` and `fuzz_grpc` says why, and docs/operations.md lists them.
"""

from __future__ import annotations

import collections
import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from backend_lib.router.fields import ALIASES, FIELDS
from tests.support.clients import HttpClient, grpc_stream
from tests.support.fuzz import BOUND, Draw, Outcome
from tests.support.fuzz_grpc import grpc_case
from tests.support.fuzz_http import http_case
from tests.support.hashing import GREEDY, PROMPT, answer
from tests.support.metrics import Scrape, wait_metrics
from tests.support.server import RunningServer, running_server

CLIENTS = 12
CONTEXT = 48  # so that no request is computed for long, whatever it asks for
TOKENS = 40  # of a witness
GROWTH = 48 << 20  # bytes that a process may be larger after the second half of a run than after the first

# An error of ours names a field, or says what there is too little of; any other must be known to be Triton's.
NAMES = "|".join([*FIELDS, *ALIASES, "text_input", "sampling_parameters", "timeout", "parameters"])
OURS = re.compile(
    rf"'({NAMES})(\W[^']*)?' (is|has|are|and|hold|make|cannot) |unknown field |the request id is missing; |"
    r"the request cannot be read: 'parameters' |"
    r"the request's timeout of |no (room|slots) for |the request was cancelled"
)
TRITONS = re.compile(
    r"failed to parse the request JSON|Unable to parse|Converting keyword|Expected JSON object|attempt to get members|"
    r"parameter key '.*' was not found|parameter '.*' has invalid type\. It should be|The schema can not convert|"
    r"Not Found|Method Not Allowed|Request for unknown model|Unsupported content-encoding|invalid value (type )?for|"
    r"generate expects model to produce exactly 1|unexpected inference (in|out)put|unexpected (explicit|additional) |"
    r"HTTP \d+|ModelInfer RPC doesn't support|Unable to find shared memory region|contents field must not|"
    r"(invalid|failed to get) model version|string correlation ID cannot be|unable to find data for|"
    r"incomplete string data|parameter keys starting with 'triton_'|"
    r"\[request id: .*\] (out of bounds index|incomplete string|All input dimensions) |"
    r"\[request id: .*\] (input|inference|expected|unexpected|got) ",
    re.DOTALL,
)


class Witness:
    """A request that runs again and again beside the others. What it says must not change."""

    def __init__(self, ask: Callable[[], str]) -> None:
        self.count = 0
        self.error: BaseException | None = None
        self._ask = ask
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                assert self._ask() == answer(TOKENS)
                self.count += 1
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(BOUND)
        assert self.error is None, self.error
        assert self.count > 2


class Fuzzing:
    """Sends cases of one seed and keeps how each has ended."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self._server = server
        self._seed = seed
        config = HttpClient(server.http_url).config()
        self._inputs = {each["name"]: each["data_type"] for each in config["input"]}
        self._shape = (1, 1) if config["max_batch_size"] else (1,)
        self._thread = threading.local()
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.strange: list[str] = []

    def run(self, cases: range) -> None:
        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(self._send, cases))
        assert not self.strange, "\n".join(self.strange[:20])

    def _send(self, number: int) -> None:
        if self._server.process.exit_code() is not None:
            return  # the cases before this one have the blame
        draw = Draw(f"{self._seed}/{number}")
        started = time.monotonic()
        try:
            outcome = http_case(draw).send(self._server.http_url) if number % 2 else self._send_grpc(draw)
            assert time.monotonic() - started < BOUND, "it took too long"
            self._keep(outcome)
        except Exception as error:
            self.strange.append(f"seed {self._seed}, case {number}: {type(error).__name__} {str(error)[:500]}")

    def _send_grpc(self, draw: Draw) -> Outcome:
        if not hasattr(self._thread, "channel"):
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
            self._thread.channel = grpc.insecure_channel(self._server.grpc_url, options=options)
        return grpc_case(draw, self._inputs, self._shape).send(self._thread.channel)

    def _keep(self, outcome: Outcome) -> None:
        if outcome.kind != "error":
            self.outcomes[outcome.kind] += 1
        for words in filter(None, outcome.words.split("\n")) if outcome.kind == "error" else ():
            owner = "ours" if OURS.match(words) else "Triton's"
            self.outcomes[f"{owner} error"] += 1
            if owner != "ours" and not TRITONS.match(words):
                raise AssertionError(f"whose words are these: {words[-300:]}")


@pytest.fixture(scope="module")
def fuzzed(hash_checkpoint: Path) -> Iterator[RunningServer]:
    with _fuzzed(hash_checkpoint) as running:
        yield running


@contextlib.contextmanager
def _fuzzed(hash_checkpoint: Path, **more: str) -> Iterator[RunningServer]:
    # Triton never finishes unloading a model once gRPC has refused a request to it: do not wait for that.
    settings = {"max_model_len": CONTEXT, "queue_size": 2048, **more}
    with running_server(model=hash_checkpoint, settings=settings, extra_flags=["--exit-timeout-secs=1"]) as running:
        yield running


def test_hostile_requests(fuzzed: RunningServer):
    _fuzz(fuzzed, seed=1, count=1000)


@pytest.mark.long
def test_many_hostile_requests(fuzzed: RunningServer):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    _fuzz(fuzzed, seed=seed, count=20_000)


@pytest.mark.long
def test_hostile_requests_under_the_contract_of_tensorrtllm_backend(hash_checkpoint: Path):
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    with _fuzzed(hash_checkpoint, contract="trtllm") as server:
        _fuzz(server, seed=seed, count=5000)


def test_parameters_that_are_too_long_in_all(fuzzed: RunningServer):
    """Python parses them without letting other threads run, and they come before anything else of a request."""
    error = HttpClient(fuzzed.http_url).error(PROMPT, parameters={"guided_regex": "a" * (1 << 20)})
    words = "the request cannot be read: 'parameters' are not readable (more than 1048576 characters)"
    assert error == (400, words)


def _family(server: RunningServer) -> list[int]:
    """tritonserver, the router and the worker. What the worker tries grammars in is there to be ended."""
    workers = [child.pid for stub in server.stub_pids for child in psutil.Process(stub).children()]
    return [server.pid, *server.stub_pids, *workers]


def _fuzz(server: RunningServer, seed: int, count: int) -> None:
    family = _family(server)
    witnesses = [Witness(lambda ask=ask: ask(server)) for ask in (_generate, _generate_stream, _grpc_stream)]
    fuzzing = Fuzzing(server, seed)
    try:
        fuzzing.run(range(count // 2))
        sizes = _sizes(family)
        fuzzing.run(range(count // 2, count))
    finally:
        assert server.process.exit_code() is None, server.log
        for witness in witnesses:
            witness.close()
    print(dict(fuzzing.outcomes), [witness.count for witness in witnesses])
    for kind in ("answer", "left", "ours error", "Triton's error"):
        assert fuzzing.outcomes[kind] > count / 50, fuzzing.outcomes
    _check_level(server)
    assert _family(server) == family
    grown = {pid: after - before for pid, before, after in zip(family, sizes, _sizes(family), strict=True)}
    print("grown by", grown)
    assert max(grown.values()) < GROWTH, grown


def _sizes(pids: list[int]) -> list[int]:
    return [psutil.Process(pid).memory_info().rss for pid in pids]


def _check_level(server: RunningServer) -> None:
    """Nothing is held any more: no row, no slot, no KV memory but what is cached."""
    scrape = wait_metrics(server.metrics_url, _is_level, timeout=BOUND)
    assert scrape.get("tandem_worker_restarts_total") == 0
    assert HttpClient(server.http_url).is_ready()
    assert "Traceback" not in server.log
    assert _generate(server) == answer(TOKENS)


def _is_level(scrape: Scrape) -> bool:
    kinds = ("running", "waiting", "paused")
    return not any(scrape.get(f"tandem_requests_{kind}") for kind in kinds) and not scrape.get(
        "tandem_kv_tokens", state="used"
    )


def _generate(server: RunningServer) -> str:
    body = {"exclude_input_in_output": True, "max_tokens": TOKENS, **GREEDY}
    return HttpClient(server.http_url).generate(PROMPT, **body)["text_output"]


def _generate_stream(server: RunningServer) -> str:
    return "".join(
        event["text_output"] for event in HttpClient(server.http_url).stream(PROMPT, max_tokens=TOKENS, **GREEDY)
    )


def _grpc_stream(server: RunningServer) -> str:
    with grpc_stream(server.grpc_url) as stream:
        shape = (1, 1) if HttpClient(server.http_url).config()["max_batch_size"] else (1,)
        tensors = {"text_input": np.full(shape, PROMPT.encode(), object), "stream": np.full(shape, True)}
        responses = stream.ask(None, parameters={"max_tokens": TOKENS, **GREEDY}, **tensors)
        assert not responses[-1].error, responses[-1].error
        return "".join(response.text for response in responses)
