"""Every way in which a request, the model or a process can end. After it, all that the request held is free again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import psutil
import pytest
import requests
import tritonclient.grpc.aio as grpcaio

from tests.server.conftest import LONG_CONTEXT
from tests.support.clients import TIMEOUT, HttpClient, events, grpc_stream, make_input
from tests.support.hashing import ENDLESS, GREEDY, PROMPT, PROMPT_IDS, answer, continuation, prompt_that_ends, text_of
from tests.support.processes import wait_ended
from tests.support.server import RunningServer, running_server

UNLOADING = "the model is being unloaded"
FINISH = {"return_finish_reason": True, "exclude_input_in_output": True}


@pytest.fixture(scope="module")
def tight(hash_checkpoint) -> Iterator[RunningServer]:
    """Two rows, four slots, and a KV cache that one request of `ENDLESS` needs nearly whole."""
    settings = {"max_running": 2, "queue_size": 2, "kv_tokens": ENDLESS["max_tokens"] + 10}
    with running_server(model=hash_checkpoint, settings=settings) as running:
        yield running


def by_eos(server: RunningServer) -> None:
    ids, count = prompt_that_ends()
    ended = HttpClient(server.http_url).generate(text_of(ids), max_tokens=1000, temperature=0, **FINISH)
    assert (ended["text_output"], ended["finish_reason"]) == (answer(count, ids), "stop")


def by_length(server: RunningServer) -> None:
    ended = HttpClient(server.http_url).generate(PROMPT, max_tokens=7, **GREEDY, **FINISH)
    assert (ended["text_output"], ended["finish_reason"]) == (answer(7), "length")


def by_the_context(server: RunningServer) -> None:
    """The prompt and its answer fill the KV cache to the last token."""
    room = 5
    prompt = chr(0x4E00 + 9) * (ENDLESS["max_tokens"] + 10 - room)
    ended = HttpClient(server.http_url).generate(prompt, max_tokens=99, **GREEDY, **FINISH)
    assert (len(ended["text_output"]), ended["finish_reason"]) == (room, "length")


def by_stop_string(server: RunningServer) -> None:
    ended = HttpClient(server.http_url).generate(PROMPT, stop=answer(6)[4:], **ENDLESS, **FINISH)
    assert (ended["text_output"], ended["finish_reason"]) == (answer(4), "stop")


def by_stop_token(server: RunningServer) -> None:
    token = continuation(PROMPT_IDS, 5)[4]
    ended = HttpClient(server.http_url).generate(PROMPT, stop_token_ids=token, **ENDLESS, **FINISH)
    assert (ended["text_output"], ended["finish_reason"]) == (answer(4), "stop")


def by_grpc_cancel(server: RunningServer) -> None:
    with grpc_stream(server.grpc_url) as stream:
        stream.send(PROMPT, stream=True, parameters=ENDLESS)
        stream.next()
        stream.cancel()


def by_cancel_while_waiting(server: RunningServer) -> None:
    """The second does not fit beside the first, so it is cancelled before it has begun."""
    with grpc_stream(server.grpc_url) as running, grpc_stream(server.grpc_url) as waiting:
        running.send(PROMPT, stream=True, parameters=ENDLESS)
        running.next()
        waiting.send(PROMPT, stream=True, parameters=ENDLESS)
        assert waiting.is_quiet()
        waiting.cancel()


def by_asyncio_cancel(server: RunningServer) -> None:
    async def request():
        inputs = [make_input("text_input", PROMPT), make_input("stream", True)]
        yield {"model_name": "llm", "inputs": inputs, "parameters": ENDLESS}
        await asyncio.sleep(TIMEOUT)

    async def ask() -> None:
        async with grpcaio.InferenceServerClient(server.grpc_url) as client:
            responses = client.stream_infer(request())
            await asyncio.wait_for(anext(aiter(responses)), TIMEOUT)
            responses.cancel()

    asyncio.run(ask())


def by_http_disconnect(server: RunningServer) -> None:
    pieces = HttpClient(server.http_url).stream(PROMPT, **ENDLESS)
    next(pieces)
    pieces.close()


def by_grpc_deadline(server: RunningServer) -> None:
    with grpc_stream(server.grpc_url) as stream:
        ended = stream.ask(PROMPT, stream=True, timeout_us=500_000, parameters=ENDLESS)
        assert ended[-1].error == "the request's timeout of 500000 us has passed"
        assert len(ended) > 1


def by_http_deadline(server: RunningServer) -> None:
    asked = time.monotonic()
    error = HttpClient(server.http_url).error(PROMPT, timeout=500_000, **ENDLESS)[1]
    assert error == "the request's timeout of 500000 us has passed"
    assert 0.4 < time.monotonic() - asked < 10


def by_error(server: RunningServer) -> None:
    assert HttpClient(server.http_url).error(PROMPT, max_tokens=0)[0] == 400


ENDS = {name: each for name, each in list(globals().items()) if name.startswith("by_")}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_a_request_held_is_free_again(tight, end: Callable[[RunningServer], None]):
    stub, workers = tight.stub_pid, tight.worker_pids
    for _ in range(3):
        end(tight)
    ended = time.monotonic()
    serve_many(tight)
    assert time.monotonic() - ended < 20, "the requests of before are still being computed"
    assert (tight.stub_pid, tight.worker_pids) == (stub, workers)


def serve_many(server: RunningServer) -> None:
    """More requests than there are slots, each of which starts only if all KV is free, or they would wait for ever."""
    http = HttpClient(server.http_url)
    for _ in range(6):
        ended = http.generate(PROMPT, stop=answer(3)[2], **ENDLESS, **FINISH)
        assert (ended["text_output"], ended["finish_reason"]) == (answer(2), "stop")


def test_a_stop_string_ends_a_stream_and_is_not_sent(tight):
    http = HttpClient(tight.http_url)
    for stop, text in ((answer(9)[8], answer(8)), (answer(9)[6:], answer(6))):
        pieces = list(
            http.stream(PROMPT, stop=stop, return_finish_reason=True, return_num_output_tokens=True, **ENDLESS)
        )
        assert "".join(piece["text_output"] for piece in pieces) == text
        assert pieces[-1]["finish_reason"] == "stop"
        assert sum(piece["num_output_tokens"] for piece in pieces) == 9


# The model and the processes


@contextlib.contextmanager
def serving(hash_checkpoint, flags: Sequence[str] = (), **settings: object) -> Iterator[RunningServer]:
    settings = {"drain_seconds": 1, "max_running": 2} | settings
    with running_server(
        model=hash_checkpoint, settings=settings, repository_mode="explicit", extra_flags=flags
    ) as running:
        yield running


def ends_of(answers: list[requests.Response]) -> list[dict]:
    """The last event of each stream."""
    return [list(events(answer))[-1] for answer in answers]


def test_unloading_answers_every_open_stream_and_ends_the_worker(hash_checkpoint):
    with serving(hash_checkpoint) as server, contextlib.ExitStack() as stack:
        http = HttpClient(server.http_url)
        family = psutil.Process(server.pid).children(recursive=True)
        # One request each: tritonserver can end itself when it refuses one of a stream in which another is under way.
        streams = [stack.enter_context(grpc_stream(server.grpc_url)) for _ in range(3)]
        streams[0].send(PROMPT, stream=True, request_id="running", parameters=ENDLESS)
        streams[0].next()
        answers = [http.open_stream(PROMPT, **ENDLESS)]
        for stream in streams[1:]:
            stream.send(PROMPT, request_id="waits", parameters=ENDLESS)
        assert http.unload().status_code == 200
        asked = time.monotonic()
        ended = [stream.rest()[-1] for stream in streams]
        # Triton itself refuses what reaches it after the order to unload.
        assert all(response.error == UNLOADING or "no available versions" in response.error for response in ended)
        assert [event.get("error") for event in ends_of(answers)] == [UNLOADING]
        assert 0.5 < time.monotonic() - asked < 10
        # As long as a gRPC stream is open, Triton keeps every model that it has asked.
        for stream in streams:
            stream.close()
        assert not wait_ended(family, 15)
        http.wait_unloaded()
        assert "successfully unloaded 'llm'" in server.log


def test_unloading_frees_the_worker_even_while_a_grpc_stream_stays_open(hash_checkpoint):
    with serving(hash_checkpoint) as server, grpc_stream(server.grpc_url) as stream:
        http = HttpClient(server.http_url)
        stream.ask(PROMPT, parameters={"max_tokens": 3})
        workers = processes(server.worker_pids)
        assert workers
        http.unload()
        assert not wait_ended(workers, 15)
        assert http.index()["state"] == "UNLOADING"
        assert http.load().status_code == 200
        assert http.generate(PROMPT, max_tokens=3, **GREEDY)["text_output"] == PROMPT + answer(3)


def test_a_request_that_ends_in_the_drain_time_is_answered_whole(hash_checkpoint):
    with serving(hash_checkpoint, drain_seconds=30) as server:
        http = HttpClient(server.http_url)
        pieces = http.stream(PROMPT, max_tokens=1500, **GREEDY)
        text = next(pieces)["text_output"]
        http.unload()
        text += "".join(piece["text_output"] for piece in pieces)
        assert len(text) >= 1490
        assert text[:300] == answer(300)[: len(text[:300])]


def test_sigterm_answers_open_grpc_streams_and_leaves_nothing(hash_checkpoint):
    """`running_server` looks for processes and shared memory that are left."""
    with serving(hash_checkpoint) as server, grpc_stream(server.grpc_url) as stream:
        stream.send(PROMPT, stream=True, parameters=ENDLESS)
        stream.next()
        server.process.terminate()
        assert stream.rest()[-1].error == UNLOADING
        stream.close()
        assert not wait_ended([psutil.Process(server.pid)], 20)
        assert server.process.exit_code() == 0


def test_sigterm_ends_open_http_streams_in_its_own_time_and_leaves_nothing(hash_checkpoint):
    """Triton waits for its HTTP connections before it tells anybody that it stops, and cuts them in the end."""
    with serving(hash_checkpoint, ["--exit-timeout-secs=2"]) as server:
        pieces = HttpClient(server.http_url).stream(PROMPT, **ENDLESS)
        next(pieces)
        server.process.terminate()
        asked = time.monotonic()
        with contextlib.suppress(requests.exceptions.ChunkedEncodingError):
            list(pieces)
        assert time.monotonic() - asked < 10
        assert not wait_ended([psutil.Process(server.pid)], 10)


def test_sigkill_of_tritonserver_ends_router_and_worker(hash_checkpoint):
    with serving(hash_checkpoint) as server, grpc_stream(server.grpc_url) as stream:
        stream.send(PROMPT, stream=True, parameters=ENDLESS)
        stream.next()
        stub, workers = psutil.Process(server.stub_pid), processes(server.worker_pids)
        assert workers
        os.kill(server.pid, signal.SIGKILL)
        # Nobody has reaped tritonserver yet: its router must not depend on that.
        assert not wait_ended([stub], 2)
        assert not wait_ended(workers, 2)


def test_sigkill_of_the_router_ends_the_worker(hash_checkpoint):
    with serving(hash_checkpoint) as server:
        workers = processes(server.worker_pids)
        assert workers
        os.kill(server.stub_pid, signal.SIGKILL)
        assert not wait_ended(workers, 2)


def processes(pids: list[int]) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in pids]


def test_the_context_is_what_this_file_thinks():
    assert ENDLESS["max_tokens"] + 10 < LONG_CONTEXT
