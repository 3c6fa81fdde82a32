"""From what a client sent to streams whose slots are written and can be computed."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from backend_lib.arena import Arena, ExtentAllocator, SlotRef
from backend_lib.checkpoint import Checkpoint
from backend_lib.config import Settings
from backend_lib.request import GenerationRequest
from backend_lib.router.chat import ChatTemplate
from backend_lib.router.contract import checkpoint_defaults, parse_request
from backend_lib.router.extent import extent_for, parameter_blob
from backend_lib.router.prompts import Prompts
from backend_lib.router.refusals import RequestError, refuse
from backend_lib.router.reply import Client, Verdict, verdict_of_client
from backend_lib.router.reply_readers import ReplyReaders
from backend_lib.router.siblings import Siblings
from backend_lib.router.slot_pool import SlotPool
from backend_lib.router.stream import Stream

log = logging.getLogger("tandem")

# Seconds after which a request has waited so long that its client may have gone: asking costs a round trip to Triton.
PATIENCE = 0.04


class Inbound(NamedTuple):
    """A request as it came: tensors by input name, request parameters, and who waits for the answer.

    `arrival_ns` is in `time.time_ns()`; 0 is the moment at which its slot is written. `arrived` is in
    `time.monotonic()`, and its deadline runs from there.
    """

    tensors: Mapping[str, np.ndarray]
    parameters: Mapping[str, Any]
    request_id: str
    timeout_us: int
    sender: Client
    arrival_ns: int = 0
    arrived: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of text and ids in it."""
        values = [*self.parameters.values()]
        for array in self.tensors.values():
            values += array.reshape(-1).tolist() if array.dtype == object else [array.tobytes()]
        return sum(len(value) for value in values if isinstance(value, bytes | str))


class NoRoom(RuntimeError):
    """The arena has no slots or no heap for the request until others end."""


class Over(Exception):
    """The request was over before its intake began."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.words)
        self.verdict = verdict


class _Prompt(NamedTuple):
    """What the n sequences of a request share."""

    request: GenerationRequest
    token_ids: list[int]
    bad_words: list[list[int]]
    max_tokens: int
    seed: int
    arrival_ns: int
    deadline: float | None
    leader: SlotRef


class Intake:
    """Parses, tokenises, and writes slots; the intake threads run it side by side.

    Owns the arena's heap. A slot is written before anybody else knows of it.
    """

    def __init__(
        self, settings: Settings, checkpoint: Checkpoint, arena: Arena, pool: SlotPool, *, max_len: int,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._checkpoint = checkpoint
        self._defaults = checkpoint_defaults(checkpoint)
        self._default_max_tokens = min(
            settings.default_max_tokens, checkpoint.sampling.max_tokens or settings.default_max_tokens
        )
        template = ChatTemplate.of(checkpoint)
        self._prompts = Prompts(checkpoint, template)
        self._readers = ReplyReaders(settings, checkpoint, template)
        self._slots = arena.slots
        self._pool = pool
        self._rings = [arena.ring(group) for group in range(arena.spec.num_groups)]
        self.max_len = max_len  # tokens of a sequence; the router lowers it when the KV cache turns out to hold less
        self._heap_bytes = arena.spec.heap_bytes
        self._extents = ExtentAllocator(self._heap_bytes)
        self._lock = threading.Lock()

    def prepare(self, inbound: Inbound, leader: SlotRef) -> list[Stream]:
        """The request's streams, the leader first: all of them or none. The leader's slot is the caller's.

        Raises:
            RequestError: the client's mistake.
            NoRoom: too much is under way.
            Over: its deadline has passed, or its client has gone.
        """
        request = parse_request(
            inbound.tensors, inbound.parameters, inbound.request_id, inbound.timeout_us, self._settings,
            self._checkpoint.config.vocab_size, self._defaults,
        )  # fmt: skip
        deadline = inbound.arrived + request.timeout_us / 1e6 if request.timeout_us else None
        self._check_client(inbound, request, deadline)
        request, prompt_ids = self._prompts.tokenised(request, self.max_len)
        seed = request.sampling.seed
        prompt = _Prompt(
            request=request,
            token_ids=prompt_ids,
            bad_words=self._prompts.bad_words(request),
            max_tokens=min(request.sampling.max_tokens or self._default_max_tokens, self.max_len - len(prompt_ids)),
            seed=secrets.randbits(64) if seed is None else seed,
            arrival_ns=inbound.arrival_ns or time.time_ns(),
            deadline=deadline,
            leader=leader,
        )
        return self._streams(prompt, inbound.sender, [leader, *self._more_slots(request)])

    def release(self, stream: Stream) -> None:
        """Give back a stream's extent and slot: its reply has been sent and no step holds it."""
        self._free(stream.extent)
        self._pool.retire(stream.slot, self._rings[stream.group], stream.last_command)

    def _check_client(self, inbound: Inbound, request: GenerationRequest, deadline: float | None) -> None:
        if time.monotonic() - inbound.arrived < PATIENCE and deadline is None:
            return
        verdict = verdict_of_client(request, deadline, inbound.sender)
        if verdict:
            raise Over(verdict)

    def _more_slots(self, request: GenerationRequest) -> list[SlotRef]:
        """Slots for the leader's siblings, all or none."""
        count = request.sampling.n - 1
        if count >= len(self._slots):
            refuse(request.called("n"), count + 1, f"allowed are at most {len(self._slots)}, the server's slots")
        taken = self._pool.acquire(count)
        if taken is None:
            raise NoRoom(f"no slots for {count + 1} sequences until others end")
        return taken

    def _streams(self, prompt: _Prompt, sender: Client, refs: list[SlotRef]) -> list[Stream]:
        streams: list[Stream] = []
        siblings = Siblings(sender, prompt.request) if len(refs) > 1 else None
        try:
            for index, ref in enumerate(refs):
                streams.append(
                    Stream(prompt.request, siblings.voice(index) if siblings else sender, *ref, prompt.deadline)
                )
                streams[-1].extent = self._write_slot(prompt, ref, index)
                self._readers.begin(streams[-1], prompt.request, prompt.token_ids, seed=prompt.seed, index=index)
        except BaseException:
            for stream in streams:
                if stream.extent >= 0:
                    self._free(stream.extent)
            for ref in refs[1:]:
                self._pool.give_back(ref.slot)
            raise
        return streams

    def _write_slot(self, prompt: _Prompt, ref: SlotRef, sequence_index: int) -> int:
        """Fill the slot and a new extent; the extent's offset. Raises NoRoom."""
        blob = parameter_blob(prompt.request, prompt.bad_words, prompt.leader.generation)
        extent = extent_for(
            prompt.request.sampling, len(blob), len(prompt.token_ids), prompt.max_tokens,
            is_leader=not sequence_index, vocab_size=self._checkpoint.config.vocab_size,
        )  # fmt: skip
        start = self._allocate(extent.num_bytes)
        fields = _sampling_fields(prompt) | extent.fields(start)
        fields |= {
            "generation": ref.generation,
            "sequence_index": sequence_index,
            "arrival_ns": prompt.arrival_ns,
            "params_bytes": len(blob),
            "prompt_len": len(prompt.token_ids),
        }
        self._slots.write(ref.slot, fields)
        self._slots.write_params(ref.slot, blob)
        self._slots.prompt_ids(ref.slot)[:] = prompt.token_ids
        return start

    def _allocate(self, num_bytes: int) -> int:
        if num_bytes > self._heap_bytes:
            raise RequestError(
                f"the request takes {num_bytes} bytes of shared memory with its log-probabilities; "
                f"allowed are {self._heap_bytes}, so ask for less of 'max_tokens', 'logprobs' or 'prompt_logprobs'"
            )
        with self._lock:
            extent = self._extents.allocate(num_bytes)
        if extent is None:
            raise NoRoom(f"no room for a sequence of {num_bytes} bytes until others end")
        return extent

    def _free(self, extent: int) -> None:
        with self._lock:
            self._extents.free(extent)


def _sampling_fields(prompt: _Prompt) -> dict[str, Any]:
    sampling = prompt.request.sampling
    return {
        "seed": prompt.seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": prompt.max_tokens,
        "min_tokens": min(sampling.min_tokens, prompt.max_tokens),
        "ignore_eos": sampling.ignore_eos,
        "priority": prompt.request.priority,
        "leader_slot": prompt.leader.slot,
    }
