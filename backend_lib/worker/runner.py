"""Launches steps on the device: forward, then the sampler, each as one piece of work on an ordered stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from backend_lib.models.batch import Decoder, ForwardBatch
from backend_lib.worker.logprobs import logprob_rows, row_width
from backend_lib.worker.sampler import Sampler, SamplingBatch
from backend_lib.worker.scheduler import Chunk, Plan
from backend_lib.worker.sequence import Sequence

POISON = -1  # what the relay table holds for a row that has sampled nothing yet


class InlineStream:
    """Work is done where it is launched: no overlap."""

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


class Step:
    """A launched step. `forward` runs from the start; `sample` and `finalize` are called once each, in that order."""

    def __init__(self, runner: Runner, plan: Plan) -> None:
        self.plan = plan
        self.sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        self._positions = [chunk.start + chunk.length for chunk in plan.chunks if chunk.samples]
        self._runner = runner
        self._staged = StagedBatch(plan)
        self._logits = runner.stream.submit(lambda: runner.forward(plan, self._staged))

    def sample(self) -> None:
        """Launch the sampler, once the tokens before this step are known. On an ordered stream the logits are there
        when it runs."""
        batch = SamplingBatch.of(self.sampled, self._positions, self._runner.vocab_size)
        self._results = self._runner.stream.submit(
            lambda: self._runner.sample(self._logits.result(), self.sampled, batch, self._staged.prompt_spans)
        )

    def finalize(self) -> Results:
        """Wait for the step; what it brings, in the order of `sampled`."""
        return self._results.result()


class Runner:
    """Owns what lives on the device: KV pool, KV table, relay table, sampling rows.

    Only work on the stream touches them, so the order of launches is the order of reads and writes. Each step has CPU
    arrays of its own, and none that was handed to the stream is changed.
    """

    def __init__(
        self, decoder: Decoder, *, kv_tokens: int, max_running: int, max_model_len: int,
        device: torch.device, stream: Any,
    ) -> None:  # fmt: skip
        self.stream = stream
        self._decoder = decoder
        self.vocab_size = decoder.vocab_size
        self._kv = decoder.allocate_kv(kv_tokens)
        self._kv_table = torch.zeros((max_running + 1, max_model_len), dtype=torch.int32, device=device)
        self._relay = torch.full((max_running + 1,), POISON, dtype=torch.int64, device=device)
        self._sampler = Sampler(max_running + 1, device)
        self._spare_row, self._spare_index = max_running, kv_tokens

    def launch(self, plan: Plan) -> Step:
        return Step(self, plan)

    @torch.inference_mode()
    def forward(self, plan: Plan, staged: StagedBatch) -> torch.Tensor:
        for sequence in plan.started:
            self._start_row(sequence)
        rows = torch.from_numpy(plan.rows)
        positions = torch.from_numpy(plan.positions)
        kv_index = torch.from_numpy(plan.kv_index)
        self._kv_table[rows, positions] = kv_index.int()
        decoded = self._relay[rows[: plan.num_decodes]]
        assert plan.num_decodes == 0 or decoded.min() >= 0, "a row is decoded before its token was sampled"
        batch = ForwardBatch(
            input_ids=torch.cat([decoded, torch.from_numpy(staged.prompt_ids)]),
            positions=positions,
            kv_index=kv_index,
            kv_table=self._kv_table,
            rows=staged.rows,
            query_lens=staged.query_lens,
            kv_lens=staged.kv_lens,
            logits_index=torch.from_numpy(staged.logits_index),
        )
        return self._decoder.forward(batch, self._kv)

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, sequences: list[Sequence], batch: SamplingBatch, spans: list[PromptSpan]
    ) -> Results:
        """`logits` are those of the sequences that are sampled, and then those of the spans."""
        of_prompts = _prompt_logprobs(logits[len(sequences) :], spans)
        if not sequences:
            return Results([], [], of_prompts)
        sampled = self._sampler.sample(logits[: len(sequences)], batch)
        self._relay[batch.rows] = sampled.token_ids
        told = [sequences[place] for place in batch.logprobs.tolist()]
        records = [] if sampled.logprobs is None else list(zip(told, sampled.logprobs, strict=True))
        return Results(sampled.token_ids.tolist(), records, of_prompts)

    @torch.inference_mode()
    def warm_up(self, num_tokens: int) -> float:
        """Run decode steps and prompts of `num_tokens` on the spare row and index, so that nothing is first later.

        Returns the seconds that a token of such a prompt takes then.
        """
        self._kv_table[self._spare_row] = self._spare_index
        for query_len in (num_tokens, 1, num_tokens):
            started = time.perf_counter()
            batch = ForwardBatch(
                input_ids=torch.zeros(query_len, dtype=torch.int64),
                positions=torch.arange(query_len),
                kv_index=torch.full((query_len,), self._spare_index),
                kv_table=self._kv_table,
                rows=[self._spare_row],
                query_lens=[query_len],
                kv_lens=[query_len],
                logits_index=torch.tensor([query_len - 1]),
            )
            self._decoder.forward(batch, self._kv)
        return (time.perf_counter() - started) / num_tokens

    def _start_row(self, sequence: Sequence) -> None:
        self._sampler.set_row(sequence, self.vocab_size)
        self._relay[sequence.row] = POISON
        cached = sequence.cached_indices
        self._kv_table[sequence.row, : len(cached)] = torch.from_numpy(cached)


class PromptSpan(NamedTuple):
    """Tokens of a prompt whose successors' log-probabilities are wanted: `start` up to `stop`, all but the last."""

    sequence: Sequence
    start: int
    stop: int


class StagedBatch:
    """The plan as arrays: what a forward needs that is not on the device already.

    Attributes:
        prompt_ids: int64, ids of the step's tokens after the decode rows.
        rows, query_lens, kv_lens: one per chunk.
        logits_index: int64 [L + P], the last token of every chunk that samples, and then the tokens of the spans.
        prompt_spans: of P tokens in all.
    """

    def __init__(self, plan: Plan) -> None:
        prefills = plan.chunks[plan.num_decodes :]
        self.prompt_ids = _known_ids(prefills)
        self.rows = [chunk.sequence.row for chunk in plan.chunks]
        self.query_lens = [chunk.length for chunk in plan.chunks]
        self.kv_lens = [chunk.start + chunk.length for chunk in plan.chunks]
        ends = np.cumsum(self.query_lens, dtype=np.int64) - 1
        self.logits_index = ends[[chunk.samples for chunk in plan.chunks]] if prefills else ends
        self.prompt_spans: list[PromptSpan] = []
        for place, chunk in enumerate(prefills, start=plan.num_decodes):
            self._add_span(chunk, int(ends[place]) - chunk.length + 1)

    def _add_span(self, chunk: Chunk, at: int) -> None:
        """`at`: where the chunk's first token stands in the step."""
        stop = min(chunk.start + chunk.length, len(chunk.sequence.prompt_ids) - 1)
        if chunk.sequence.prompt_logprobs is None or stop <= chunk.start:
            return
        self.prompt_spans.append(PromptSpan(chunk.sequence, chunk.start, stop))
        self.logits_index = np.append(self.logits_index, np.arange(at, at + stop - chunk.start))


def _prompt_logprobs(logits: torch.Tensor, spans: list[PromptSpan]) -> list[tuple[Sequence, slice, np.ndarray]]:
    """From float32 [P, V] logits. A token's own are those of the one before it."""
    records, at = [], 0
    for sequence, start, stop in spans:
        targets = torch.from_numpy(sequence.prompt_ids[start + 1 : stop + 1].astype(np.int64)).to(logits.device)
        logprobs = logits[at : at + len(targets)].log_softmax(dim=-1)
        assert sequence.prompt_logprobs is not None
        rows = logprob_rows(logprobs, targets, row_width(sequence.prompt_logprobs))
        records.append((sequence, slice(start + 1, stop + 1), rows))
        at += len(targets)
    return records


def _known_ids(prefills: list[Chunk]) -> np.ndarray:
    pieces = [chunk.sequence.known_ids(chunk.start, chunk.start + chunk.length) for chunk in prefills]
    return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, dtype=np.int64)
