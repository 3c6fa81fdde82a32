"""A thousand requests with the lengths of conversations, through arena, loop and publisher, and then to senders too."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from backend_lib.arena import CommandKind
from benchmarks.device.bench import Bench
from benchmarks.device.report import Sheet
from benchmarks.device.requests import Placed, Requests, chat_lengths, run_until_over

# Output tokens a second that were published for Llama-3.1-8B in bf16 with ShareGPT's lengths, on an H100.
PUBLISHED = {"SGLang": 16215, "LMDeploy": 16132, "vLLM": 12553}
H100_COPY = 0.9 * 3.35e12  # bytes a second, taken as nine tenths of what its memory is sold as
SEND_SECONDS = 0.0003


def run(sheet: Sheet, bench: Bench) -> None:
    sheet.attempt("engine only", _engine_only, bench, needs=30)
    sheet.attempt("delivered", _delivered, bench, needs=30)
    sheet.attempt("published", _published, bench, needs=0)


def _published(bench: Bench) -> dict[str, Any]:
    faster = bench.rate("copy") / H100_COPY
    scaled = {f"{name}, scaled": round(rate * faster) for name, rate in PUBLISHED.items()}
    return {"bandwidth over an H100's": faster, **PUBLISHED, **scaled}


def _place(requests: Requests, bench: Bench) -> tuple[list[Placed], list[int]]:
    """Random prompts; the slots are written and not yet posted. Prompt lengths stand beside them."""
    requests.clear()
    vocab_size, generator = bench.scale.large["vocab_size"], torch.Generator().manual_seed(0)
    lengths = chat_lengths(bench.scale)
    placed = [
        requests.place(torch.randint(2, vocab_size, (given,), generator=generator).tolist(), wanted)
        for given, wanted in lengths
    ]
    return placed, [given for given, _ in lengths]


def _engine_only(bench: Bench) -> dict[str, Any]:
    engine = bench.engine()
    requests = Requests(engine.arena)
    placed, prompt_lens = _place(requests, bench)
    started, cpu = time.perf_counter(), time.thread_time()
    for each in placed:
        requests.post(each)
    run_until_over(engine, requests, placed)
    seconds = time.perf_counter() - started
    return _rates(placed, prompt_lens, seconds) | {"loop CPU share": (time.thread_time() - cpu) / seconds}


def _rates(placed: list[Placed], prompt_lens: list[int], seconds: float) -> dict[str, Any]:
    tokens = sum(each.max_tokens for each in placed)
    return {
        "tokens/s": tokens / seconds, "with prompts, tokens/s": (tokens + sum(prompt_lens)) / seconds,
        "seconds": seconds, "requests": len(placed), "mean in": sum(prompt_lens) / len(placed),
        "mean out": tokens / len(placed),
    }  # fmt: skip


def _delivered(bench: Bench) -> dict[str, Any]:
    """Another process is the router: it posts, drains the dirty list, decodes text and sends."""
    try:
        return _deliver(bench)
    except Exception:
        bench.drop_engine()  # it is full of sequences that nobody waits for
        raise


def _deliver(bench: Bench) -> dict[str, Any]:
    engine = bench.engine()
    requests = Requests(engine.arena)
    placed, prompt_lens = _place(requests, bench)
    with _router(bench, engine, placed) as router:

        def check() -> None:
            if router.poll():
                raise RuntimeError(f"the router's process ended with {router.returncode}")

        assert router.stdin is not None and router.stdout is not None
        assert router.stdout.readline() == b"ready\n"
        router.stdin.write(b"go\n")
        router.stdin.flush()
        run_until_over(engine, requests, placed, check)
        told = json.loads(router.stdout.readline())
    expected = sum(each.max_tokens for each in placed)
    return {"ok": told["tokens"] == expected, **_rates(placed, prompt_lens, told["seconds"]), **told}


@contextmanager
def _router(bench: Bench, engine: Any, placed: list[Placed]) -> Iterator[subprocess.Popen[bytes]]:
    descriptors = [engine.arena.fd, engine.commands.fd, engine.replies.fd]
    arguments = [
        *map(str, descriptors),
        str(engine.settings.max_running),
        str(engine.settings.model),
        str(SEND_SECONDS),
    ]
    router = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.device.replies", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        pass_fds=descriptors,
    )  # fmt: skip
    threading.Thread(target=_wake_when_over, args=(router, engine, placed[0]), daemon=True).start()
    try:
        assert router.stdin is not None
        router.stdin.write(json.dumps(placed).encode() + b"\n")
        router.stdin.flush()
        yield router
        router.wait(10)
    finally:
        router.kill()
        router.wait()


def _wake_when_over(router: subprocess.Popen[bytes], engine: Any, placed: Placed) -> None:
    """The loop may wait for commands of a router that has died."""
    if router.wait():
        engine.arena.ring(0).post(CommandKind.ABORT, placed.slot, placed.generation)
        engine.commands.ring()
