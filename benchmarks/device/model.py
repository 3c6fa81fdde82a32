"""The engine as a worker builds it, on random weights that no file holds, and steps of any shape on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from backend_lib.arena import Arena, ArenaSpec, Doorbell
from backend_lib.config import Settings
from backend_lib.models.batch import ForwardBatch, chunk_words
from backend_lib.models.shapes import Part
from backend_lib.router.group import ring_records
from backend_lib.worker.engine import build_engine
from benchmarks.device.gpu import Cpu, Gpu
from benchmarks.device.scale import Scale

_HEAP_BYTES = 64 << 20


class RandomTensors:
    """A `TensorSource` (see `backend_lib.models.weights`) of any model. Values are never zero or equal: a GPU that
    multiplies zeros takes less power, and is faster than it will ever be."""

    def check(self, name: str, shape: Sequence[int], expert: int | None = None) -> None: ...

    def read_into(self, out: torch.Tensor, name: str, expert: int | None = None, part: Part | None = None) -> None:
        if "norm" in name:
            out.fill_(1.0)
        else:
            out.normal_(std=0.02)

    def check_all_read(self) -> None: ...


@contextmanager
def random_weights() -> Iterator[None]:
    with mock.patch("backend_lib.models.load.open_tensors", lambda checkpoint, readers: RandomTensors()):
        yield


def settings_for(scale: Scale, gpu: Gpu | Cpu, folder: Path, **changes: Any) -> Settings:
    values = {
        "model": str(folder), "device": gpu.settings, "dtype": scale.dtype_name, "overlap": "on",
        "max_running": scale.max_running, "prefill_chunk": scale.prefill_chunk, "threads": 1,
    }  # fmt: skip
    return Settings(**values | changes)


class Engine:
    """An infer loop with its arena.

    Attributes:
        commands, replies: the doorbells of an engine's two sides.
    """

    def __init__(self, settings: Settings, max_model_len: int, *, num_slots: int) -> None:
        spec = ArenaSpec(
            num_groups=1, num_ranks=1, num_slots=num_slots,
            ring_records=max(ring_records(settings.max_running), num_slots), dirty_records=max(4 * num_slots, 1024),
            heap_bytes=_HEAP_BYTES,
        )  # fmt: skip
        self.settings = settings
        self.max_model_len = max_model_len
        self.arena = Arena.create(spec, {"settings": settings.as_dict(), "max_model_len": max_model_len})
        self.commands, self.replies = Doorbell(), Doorbell()
        built = build_engine(self.arena, 0, 0, bells=[self.commands], replies=self.replies)
        self.loop, self.kv_tokens = built.loop, built.kv_tokens
        self.arena.status(0, 0).set_ready(built.kv_tokens, built.predicted_step)


class Steps:
    """Steps of the engine's own decoder, at rows and lengths of our choice. Only while its loop does not run."""

    def __init__(self, engine: Engine) -> None:
        runner = engine.loop._runner
        self.decoder, self.kv, self.table, self.sampler = (
            runner._decoder, runner._kv, runner._kv_table, runner._sampler,
        )  # fmt: skip
        self.config = self.decoder.config
        self.kv_tokens = engine.kv_tokens
        self.chunk = engine.settings.prefill_chunk
        self._device = self.decoder.device
        for pool in self.kv:
            pool.normal_()

    def holds(self, rows: int, context: int) -> bool:
        return rows < len(self.table) and rows * context <= self.kv_tokens and context <= self.table.shape[1]

    def decode_batch(self, rows: int, context: int) -> ForwardBatch:
        """One token of each row, the last of `context`. Places in the pool are scattered, as after hours of serving."""
        self._scatter(rows, context)
        inputs = self.decoder.inputs.part(0, rows)
        inputs.input_ids.random_(0, self.config.vocab_size)
        inputs.token_rows.copy_(torch.arange(rows))
        inputs.positions.fill_(context - 1)
        inputs.kv_index.copy_(self.table[:rows, context - 1])
        return ForwardBatch(
            **inputs._asdict(), kv_table=self.table, num_decodes=rows, prompt_logits_index=None,
            chunks=self.table[:0, :4], rows=[*range(rows)], query_lens=[1] * rows, kv_lens=[context] * rows,
        )  # fmt: skip

    def prompt_batches(self, length: int) -> list[ForwardBatch]:
        """A prompt in the chunks in which it is computed."""
        self._scatter(1, length)
        chunks = [(start, min(self.chunk, length - start)) for start in range(0, length, self.chunk)]
        return [self._chunk(start, size) for start, size in chunks]

    def forward(self, batches: list[ForwardBatch]) -> None:
        for batch in batches:
            self.decoder.forward(batch, self.kv)

    def _chunk(self, start: int, size: int) -> ForwardBatch:
        where: dict[str, Any] = {"dtype": torch.int64, "device": self._device}
        words = torch.from_numpy(chunk_words([0], [size], [start + size])).to(self._device)
        return ForwardBatch(
            input_ids=torch.randint(self.config.vocab_size, (size,), **where), token_rows=torch.zeros(size, **where),
            positions=torch.arange(start, start + size, **where), kv_index=self.table[0, start : start + size].long(),
            kv_table=self.table, num_decodes=0, prompt_logits_index=torch.tensor([size - 1], **where), chunks=words,
            rows=[0], query_lens=[size], kv_lens=[start + size],
        )  # fmt: skip

    def _scatter(self, rows: int, context: int) -> None:
        places = torch.randperm(self.kv_tokens, device=self._device)[: rows * context]
        self.table[:rows, :context] = places.view(rows, context).int()

    # Bytes and operations.

    @property
    def weights(self) -> int:
        """Numbers that a step multiplies by: all but the embedding."""
        config = self.config
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        per_layer = (heads + config.num_heads * config.head_dim + 3 * config.intermediate_size) * config.hidden_size
        return config.num_layers * per_layer

    @property
    def head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    def decode_bytes(self, rows: int, context: int) -> int:
        """Least bytes of a decode step: every weight and every key and value once."""
        item = self.kv[0].dtype.itemsize
        return item * (self.weights + self.head_weights) + rows * context * self.decoder.kv_bytes_per_token

    def prompt_flops(self, length: int) -> int:
        """Of a whole prompt's products: those of the weights, of causal attention, and of each chunk's last logits."""
        config = self.config
        attention = 4 * config.num_layers * config.num_heads * config.head_dim * length * (length + 1) // 2
        heads = 2 * self.head_weights * -(-length // self.chunk)
        return 2 * self.weights * length + attention + heads
