"""Launches steps on the device: forward, then the sampler, each as one piece of work on an ordered stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from backend_lib.models.batch import Decoder
from backend_lib.models.graphed import GraphedDecoder
from backend_lib.worker.device import Device, Exchange
from backend_lib.worker.following import FollowingSampler, LeadingSampler
from backend_lib.worker.inputs import InputStage, StagedBatch
from backend_lib.worker.logprobs import Logprobs, logprob_rows
from backend_lib.worker.process_groups import SOLO, RankGroup, Solo
from backend_lib.worker.sampler import Sampler
from backend_lib.worker.sampling import SamplingOperations
from backend_lib.worker.scheduler import Plan
from backend_lib.worker.sequence import Sequence


class InlineStream:
    """Work is launched where it is asked for: on a CPU that is to do it, on a GPU its own stream orders it."""

    def submit(self, work: Callable[[], Any]) -> Future:
        future: Future = Future()
        future.set_result(work())
        return future


def compute_thread() -> ThreadPoolExecutor:
    """A CPU's stream: one thread that does the work in the order in which it was launched."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="tandem-compute")


class Results(NamedTuple):
    """What a step brings. `logprobs` stands beside each sequence that tells them: the record of its token.
    `prompt_logprobs`: the places of its prompt, and their records."""

    token_ids: list[int]
    logprobs: list[tuple[Sequence, np.ndarray]]
    prompt_logprobs: list[tuple[Sequence, slice, np.ndarray]]


class Fetched(NamedTuple):
    """Results on their way: arrays that are filled once the step is done."""

    token_ids: np.ndarray
    logprobs: Records | None
    prompt_logprobs: list[Records]


class Records(NamedTuple):
    ranks: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray

    def rows(self, width: int) -> np.ndarray:
        return logprob_rows(*self, width)


class Step:
    """A launched step. `forward` runs from the start; `sample` and `finalize` are called once each, in that order."""

    def __init__(self, runner: Runner, plan: Plan) -> None:
        self.plan = plan
        self.sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        self._positions = [chunk.start + chunk.length for chunk in plan.chunks if chunk.samples]
        self._runner = runner
        self._exchange = runner.device.exchange()
        with runner.device.launching():
            self._staged = StagedBatch(plan, self._exchange.put, padded=runner.padded(plan.num_decodes))
            self._exchange.send()
            self._logits = runner.stream.submit(lambda: runner.forward(self._staged))

    def sample(self) -> None:
        """Launch the sampler, once the tokens before this step are known. On an ordered stream the logits are there
        when it runs."""
        runner, exchange = self._runner, self._exchange
        with runner.device.launching():
            self._batch = runner.sampling_batch(self.sampled, self._positions, exchange)
            exchange.send()
            self._fetched = runner.stream.submit(
                lambda: runner.sample(self._logits.result(), self._batch, self._staged, exchange)
            )

    def finalize(self) -> Results:
        """Wait for the step; what it brings, in the order of `sampled`."""
        fetched = self._fetched.result()
        self._exchange.wait()
        results = Results(fetched.token_ids.tolist(), self._records(fetched), self._prompt_records(fetched))
        self._exchange.close()
        return results

    def _records(self, fetched: Fetched) -> list[tuple[Sequence, np.ndarray]]:
        if fetched.logprobs is None:
            return []
        told = [self.sampled[place] for place in self._batch.told]
        return list(zip(told, fetched.logprobs.rows(self._batch.logprob_width), strict=True))

    def _prompt_records(self, fetched: Fetched) -> list[tuple[Sequence, slice, np.ndarray]]:
        """A token's own are those of the one before it. Rank 0 has them."""
        if not fetched.prompt_logprobs:
            return []
        return [
            (span.sequence, slice(span.start + 1, span.stop + 1), records.rows(span.width))
            for span, records in zip(self._staged.prompt_spans, fetched.prompt_logprobs, strict=True)
        ]


class Runner:
    """Owns what lives on the device: KV pool, KV table, the sampler's rows.

    Only work on the stream touches them, so the order of launches is the order of reads and writes. Each step has
    arrays of its own (its `Exchange`), and none that was handed to the stream is changed before the step is over.
    """

    def __init__(
        self, decoder: Decoder, *, kv_tokens: int, max_running: int, max_model_len: int, device: Device, stream: Any,
        operations: SamplingOperations, inputs: InputStage, ranks: RankGroup | Solo = SOLO,
    ) -> None:  # fmt: skip
        self.stream = stream
        self.device = device
        self._decoder = decoder
        self._inputs = inputs
        self._operations = operations
        self.vocab_size = decoder.vocab_size
        self._kv = decoder.allocate_kv(kv_tokens)
        where = device.torch_device
        self._kv_table = torch.zeros((max_running + 1, max_model_len), dtype=torch.int32, device=where)
        self.spare_row, self.spare_index = max_running, kv_tokens
        self._kv_table[self.spare_row] = self.spare_index
        self._sampler = _sampler(ranks, max_running + 1, where, operations)
        self._samples = ranks.rank == 0

    def capture(self, max_rows: int) -> None:
        """Make graphs of what has them, for up to so many rows."""
        if isinstance(self._decoder, GraphedDecoder):
            self._decoder.capture(self._kv, self._kv_table)
            self._sampler.capture(self._decoder.logits, max_rows)

    def launch(self, plan: Plan) -> Step:
        return Step(self, plan)

    def padded(self, num_decodes: int) -> int:
        """How many decode rows a step is filled up to."""
        return self._inputs.padded(num_decodes)

    @torch.inference_mode()
    def forward(self, staged: StagedBatch) -> torch.Tensor:
        """float32 logits [L + P, V]: those of the sequences that are sampled, and then those of the spans."""
        if staged.started is not None:
            self._sampler.start(staged.started, self.vocab_size)
        for row, cached in staged.cached:
            self._kv_table[row, : len(cached)] = cached
        batch = self._inputs.stage(staged, self._sampler.relay, self._kv_table, self.spare_row, self.spare_index)
        return self._decoder.forward(batch, self._kv)

    def sampling_batch(self, sequences: list[Sequence], positions: list[int], exchange: Exchange) -> Any:
        """A `SamplingBatch`, or what a rank that samples nothing has in its place."""
        return self._sampler.batch(sequences, positions, self.vocab_size, exchange.put)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: Any, staged: StagedBatch, exchange: Exchange) -> Fetched:
        count = len(batch.rows)
        told = self._prompt_logprobs(logits[count:], staged) if self._samples else []
        of_prompts = [_fetch(each, exchange) for each in told]
        token_ids, logprobs = self._sampler.sample(logits[:count], batch) if count else (batch.rows, None)
        records = None if logprobs is None else _fetch(logprobs, exchange)
        fetched = Fetched(exchange.fetch(token_ids), records, of_prompts)
        exchange.launched()
        return fetched

    def _prompt_logprobs(self, logits: torch.Tensor, staged: StagedBatch) -> list[Logprobs]:
        found, at = [], 0
        for span in staged.prompt_spans:
            rows = logits[at : at + len(span.targets)]
            found.append(self._operations.logprobs(rows, span.targets, span.width))
            at += len(span.targets)
        return found


def _sampler(ranks: RankGroup | Solo, num_rows: int, device: torch.device, operations: SamplingOperations) -> Any:
    if isinstance(ranks, Solo):
        return Sampler(num_rows, device, operations)
    if ranks.rank == 0:
        return LeadingSampler(ranks, num_rows, device, operations)
    return FollowingSampler(ranks, num_rows, device)


def _fetch(logprobs: Logprobs, exchange: Exchange) -> Records:
    return Records(*(exchange.fetch(each) for each in logprobs))
