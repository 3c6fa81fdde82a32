"""The router: takes requests, gives them to the workers through the arena, and brings back what they produce."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from backend_lib.arena import Arena, ArenaSpec, ExtentAllocator
from backend_lib.checkpoint import Checkpoint, open_checkpoint
from backend_lib.config import Settings
from backend_lib.request import FinishReason, GenerationRequest
from backend_lib.router import finished
from backend_lib.router.contract import RequestError, checkpoint_defaults, parse_request
from backend_lib.router.group import MAX_DEATHS, Group
from backend_lib.router.metrics import GENERATION_TOKENS, PREFIX_HITS, PROMPT_TOKENS, RESTARTS, Metrics
from backend_lib.router.metrics_pusher import Look, WorkerCounts
from backend_lib.router.reply import UNLOADING, ErrorKind, Sender, Verdict
from backend_lib.router.reply_pool import ReplyPool
from backend_lib.router.slot_pool import SlotPool
from backend_lib.router.stream import Stream
from backend_lib.router.supervisor import Supervisor
from backend_lib.router.text import TextStream
from backend_lib.router.watcher import Watcher

log = logging.getLogger("tandem")

REPLY_THREADS = 4
INTAKE_THREADS = 2
RING_RECORDS = 4096
MAX_HEAP_BYTES = 1 << 31
MAX_FAILED_STARTS = 5  # in a row, over some 15 seconds; then those who wait for the worker are told
PARAMS_BYTES = 4096  # of a typical slot's parameter blob, for the size of the heap


class Inbound(NamedTuple):
    """A request as it came: tensors by input name, request parameters, and who waits for the answer.

    `arrival_ns` is in `time.time_ns()`; 0 is the moment at which its slot is written.
    """

    tensors: Mapping[str, np.ndarray]
    parameters: Mapping[str, Any]
    request_id: str
    timeout_us: int
    sender: Sender
    arrival_ns: int = 0


class ArenaFull(RuntimeError):
    """The heap has no room for a request's tokens."""


class Router:
    """Owns the arena and everything in the router's process.

    A request's way: `submit` takes a slot → an intake thread parses, tokenises and writes the slot → the group posts
    it → the doorbell thread marks what the worker has touched → a reply thread sends. A slot is retired when its
    client has the last response and the worker has released it.
    """

    def __init__(self, settings: Settings, *, is_serving: Callable[[], bool] = lambda: True) -> None:
        """Load the tokenizer, make the arena and start the workers.

        `is_serving`: whether the model is wanted; once it is not, streams are ended after the drain time.

        Raises:
            ValueError, OSError, RuntimeError: the model cannot be served, in words for Triton's log.
        """
        self._settings = settings
        self._checkpoint = open_checkpoint(settings.model)
        self._defaults = checkpoint_defaults(self._checkpoint)
        self._default_max_tokens = min(
            settings.default_max_tokens, self._checkpoint.sampling.max_tokens or settings.default_max_tokens
        )
        self._max_model_len = _max_model_len(settings, self._checkpoint)
        self._arena = Arena.create(
            spec := _arena_spec(settings, self._max_model_len),
            {"settings": settings.as_dict(), "max_model_len": self._max_model_len},
        )
        self._pool = SlotPool(spec.num_slots)
        self._extents = ExtentAllocator(spec.heap_bytes)
        self._extents_lock = threading.Lock()
        self._group = Group(self._arena, 0, max_running=settings.max_running, on_released=self._maybe_retire)
        self._streams: dict[int, Stream] = {}  # by slot; from the slot's writing to its retirement
        self._closing = False
        self.metrics = Metrics()
        self.worker_counts = WorkerCounts(self.metrics, self._look)
        self._supervisor = Supervisor(self._arena, self._group, on_up=self._group.came_up, on_down=self._worker_died)
        kv_tokens = self._supervisor.start()
        self._max_len = min(self._max_model_len, kv_tokens)
        self._replies = ReplyPool(REPLY_THREADS, self._answer)
        self._watcher = Watcher(
            self._end,
            on_drained=self._supervisor.close,  # the worker's memory is free, however long Triton keeps the router
            is_serving=is_serving,
            drain_seconds=settings.drain_seconds,
        )
        self._intake = ThreadPoolExecutor(INTAKE_THREADS, thread_name_prefix="tandem-intake")
        self._doorbell = threading.Thread(target=self._drain_forever, name="tandem-doorbell", daemon=True)
        self._doorbell.start()

    def submit(self, inbound: Inbound) -> None:
        """Take a request and return at once; everything else, errors included, goes through its sender."""
        taken = None if self._closing else self._pool.acquire()
        if taken is None:
            inbound.sender.fail(ErrorKind.UNAVAILABLE, self._refusal())
            reason = "unloading" if self._closing else "queue_full"
            finished.refused(self.metrics, inbound.request_id, reason, ErrorKind.UNAVAILABLE)
            return
        self._intake.submit(self._take, inbound, *taken)

    def close(self) -> None:
        """End every request and every worker. Each client still waiting is told."""
        self._closing = True
        self._intake.shutdown()
        for stream in list(self._streams.values()):
            if stream.decide(UNLOADING):
                self._replies.mark(stream)
        self._watcher.close()
        self._supervisor.close()
        self._group.replies.ring()
        self._doorbell.join()
        self._replies.close()

    # Intake threads.

    def _take(self, inbound: Inbound, slot: int, generation: int) -> None:
        """Parse, tokenise, write the slot, queue. What goes wrong here is this request's alone."""
        try:
            stream = self._prepare(inbound, slot, generation)
        except RequestError as error:
            self._refuse(inbound, slot, ErrorKind.INVALID_ARG, str(error))
            finished.refused(self.metrics, inbound.request_id, "invalid", ErrorKind.INVALID_ARG)
        except ArenaFull as error:
            self._refuse(inbound, slot, ErrorKind.UNAVAILABLE, str(error))
            finished.refused(self.metrics, inbound.request_id, "arena_full", ErrorKind.UNAVAILABLE)
        except Exception as error:
            log.exception("a request could not be prepared")
            self._refuse(inbound, slot, ErrorKind.INTERNAL, f"{type(error).__name__}: {error}")
            finished.failed(self.metrics, inbound.request_id)
        else:
            self._streams[slot] = stream
            self._watcher.add(stream)  # first: a stream that has been submitted may be over before the next line
            self._group.submit(stream)
            self.metrics.touch()

    def _refuse(self, inbound: Inbound, slot: int, kind: ErrorKind, message: str) -> None:
        self._pool.retire(slot, self._group.ring, 0)
        inbound.sender.fail(kind, message)

    def _prepare(self, inbound: Inbound, slot: int, generation: int) -> Stream:
        request = parse_request(
            inbound.tensors, inbound.parameters, inbound.request_id, inbound.timeout_us, self._settings,
            self._checkpoint.config.vocab_size, self._defaults,
        )  # fmt: skip
        prompt_ids = self._checkpoint.tokenizer.encode(request.text).ids
        max_tokens = self._max_tokens(request, len(prompt_ids))
        stream = Stream(request, inbound.sender, slot, generation)
        sampling = request.sampling
        text = TextStream(self._checkpoint.tokenizer, sampling.stop, sampling.min_tokens, prompt_ids=prompt_ids)
        stream.begin(text, len(prompt_ids))
        arrival_ns = inbound.arrival_ns or time.time_ns()
        stream.extent = self._write_slot(request, slot, generation, prompt_ids, max_tokens, arrival_ns)
        return stream

    def _max_tokens(self, request: GenerationRequest, prompt_len: int) -> int:
        """Output tokens allowed: what was asked for or the default, as far as the context reaches."""
        if prompt_len == 0:
            raise RequestError("'text_input' has no tokens; allowed is text of at least one token")
        if prompt_len >= self._max_len:
            raise RequestError(
                f"'text_input' has {prompt_len} tokens; allowed are at most {self._max_len - 1}, "
                f"so that one more fits in {self._max_len}"
            )
        asked = request.sampling.max_tokens or self._default_max_tokens
        return min(asked, self._max_len - prompt_len)

    def _write_slot(
        self, request: GenerationRequest, slot: int, generation: int, prompt_ids: list[int], max_tokens: int,
        arrival_ns: int,
    ) -> int:  # fmt: skip
        """Fill the slot and a new extent; the extent's offset. Raises ArenaFull."""
        sampling = request.sampling
        blob = json.dumps({"stop_token_ids": sampling.stop_token_ids}).encode()
        prompt_at = -(-len(blob) // 8) * 8
        output_at = prompt_at + 4 * len(prompt_ids)
        with self._extents_lock:
            extent = self._extents.allocate(output_at + 4 * max_tokens)
        if extent is None:
            raise ArenaFull(f"no room for a request of {len(prompt_ids)} + {max_tokens} tokens until others end")
        slots = self._arena.slots
        slots.write(
            slot,
            {
                "generation": generation,
                "arrival_ns": arrival_ns,
                "seed": secrets.randbits(64) if sampling.seed is None else sampling.seed,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": max_tokens,
                "min_tokens": min(sampling.min_tokens, max_tokens),
                "ignore_eos": sampling.ignore_eos,
                "priority": request.priority,
                "group": self._group.index,
                "leader_slot": slot,
                "params_offset": extent,
                "params_bytes": len(blob),
                "prompt_offset": extent + prompt_at,
                "prompt_len": len(prompt_ids),
                "output_offset": extent + output_at,
            },
        )
        slots.write_params(slot, blob)
        slots.prompt_ids(slot)[:] = prompt_ids
        return extent

    # The doorbell thread.

    def _drain_forever(self) -> None:
        while not self._closing:
            self._group.replies.wait()
            self._drain()

    def _drain(self) -> None:
        touched = self._group.dirty.drain()
        if touched is None:
            self._rescan()
            return
        for ref in touched:
            stream = self._streams.get(ref.slot)
            if stream and stream.generation == ref.generation:
                self._touch(stream)

    def _rescan(self) -> None:
        for stream in list(self._streams.values()):
            self._touch(stream)

    def _touch(self, stream: Stream) -> None:
        published = self._arena.slots.published(stream.slot, stream.generation)
        self._replies.mark(stream)
        if published and published.released:
            self._group.settle(stream)

    # Reply threads, and whoever ends a stream.

    def _answer(self, stream: Stream) -> None:
        before = stream.num_output_tokens
        try:
            stream.advance(self._arena.slots, self._group.abort)
        except Exception as error:
            log.exception("a reply could not be made")
            if stream.decide(Verdict(FinishReason.ERROR, ErrorKind.INTERNAL, f"{type(error).__name__}: {error}")):
                self._end(stream)
        self._account(stream, stream.num_output_tokens - before, is_first=not before)
        self._maybe_retire(stream)

    def _account(self, stream: Stream, num_tokens: int, *, is_first: bool) -> None:
        """Count what a reply thread has just brought to a stream."""
        self.metrics.count(GENERATION_TOKENS, num_tokens)
        if num_tokens and is_first:
            self.metrics.count(PROMPT_TOKENS, stream.num_input_tokens)
            self.metrics.count(PREFIX_HITS, stream.cached_tokens)
        if stream.finished:
            stream.finished.log()
            stream.finished.add_to(self.metrics)
            stream.finished = None

    def _end(self, stream: Stream) -> None:
        """The stream has a verdict: stop computing it and tell the client."""
        self._group.abort(stream)
        self._replies.mark(stream)

    def _maybe_retire(self, stream: Stream) -> None:
        if not stream.may_retire():
            return
        self._watcher.discard(stream)
        del self._streams[stream.slot]
        with self._extents_lock:
            self._extents.free(stream.extent)
        self._pool.retire(stream.slot, self._group.ring, stream.last_command)

    # The supervisor's thread.

    def _worker_died(self, words: str) -> None:
        """No worker is alive: what it had published is still sent, and the next one goes on from there."""
        log.error("%s; starting another", words)
        self.metrics.count(RESTARTS)
        self.worker_counts.take()  # before they are cleared
        gone = self._group.went_down()
        self.worker_counts.take()
        for stream in gone:
            blame = f"the worker died {MAX_DEATHS} times while it computed this request"
            if stream.deaths >= MAX_DEATHS:
                stream.decide(Verdict(FinishReason.ERROR, ErrorKind.INTERNAL, blame))
            self._maybe_retire(stream)
        if self._supervisor.failed_starts >= MAX_FAILED_STARTS:
            self._end_all(Verdict(FinishReason.ERROR, ErrorKind.UNAVAILABLE, f"the model cannot be loaded: {words}"))
        self._rescan()

    def _look(self) -> Look:
        status = self._arena.status(self._group.index, 0)
        return Look(status.load, status.heartbeat_ns, status.kv_tokens, self._group.num_streams)

    def _end_all(self, verdict: Verdict) -> None:
        for stream in list(self._streams.values()):
            if stream.decide(verdict):
                self._end(stream)

    def _refusal(self) -> str:
        if self._closing:
            return UNLOADING.words
        return f"the queue is full: {self._settings.queue_size} requests wait, as many as queue_size allows"


def _max_model_len(settings: Settings, checkpoint: Checkpoint) -> int:
    """Tokens a sequence may have. Raises ValueError when more is asked for than the checkpoint was made for."""
    if settings.max_model_len is None:
        return checkpoint.context_length
    if settings.max_model_len > checkpoint.context_length:
        raise ValueError(
            f"parameter 'max_model_len' is {settings.max_model_len}; "
            f"allowed is at most {checkpoint.context_length}, the context of {settings.model}"
        )
    return settings.max_model_len


def _arena_spec(settings: Settings, max_model_len: int) -> ArenaSpec:
    num_slots = settings.queue_size + settings.data_parallel * settings.max_running
    return ArenaSpec(
        num_groups=settings.data_parallel,
        num_ranks=settings.tensor_parallel,
        num_slots=num_slots,
        ring_records=RING_RECORDS,
        dirty_records=max(4 * num_slots, 1024),
        heap_bytes=min(num_slots * (4 * max_model_len + PARAMS_BYTES), MAX_HEAP_BYTES),
    )
