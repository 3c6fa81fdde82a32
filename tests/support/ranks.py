"""Groups of ranks in processes of their own, which compute together over Gloo as workers do."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import Decoder, ForwardBatch, load_decoder
from backend_lib.models.graphed import GraphedDecoder
from backend_lib.worker.process_groups import RankGroup
from tests.support.forward import ForwardDriver, generate, logits_in_random_steps

_CONTEXT = multiprocessing.get_context("spawn")
_DEADLINE = 150  # seconds, for one call


class RankPool:
    """`size` processes that have imported torch. A call is made on all of them at the same time."""

    def __init__(self, size: int, folder: Path) -> None:
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, size, str(folder / "store"), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(ranks, *args)` returns on each rank. AssertionError with what went wrong on any."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_DEADLINE), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        errors = [f"rank {rank}: {answer}" for rank, (is_well, answer) in enumerate(answers) if not is_well]
        assert not errors, "\n".join(errors)
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TRITON_INTERPRET": "1"}
    torch.set_num_threads(1)
    ranks = RankGroup(dist.FileStore(store, size), rank, size, torch.device("cpu"))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(ranks, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class Told:
    """A share of a decoder whose logits are told to all ranks, so that each can play the whole of a test."""

    def __init__(self, ranks: RankGroup, share: Decoder) -> None:
        self.vocab_size, self.kv_bytes_per_token = share.vocab_size, share.kv_bytes_per_token
        self.allocate_kv = share.allocate_kv
        self.kind = type(share).__name__
        self._ranks = ranks
        self._forward = Staged(share).forward if isinstance(share, GraphedDecoder) else share.forward

    def forward(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        logits = self._forward(batch, kv)
        assert logits.shape == (len(batch.logits_index), 0 if self._ranks.rank else self.vocab_size)
        assert logits.dtype == torch.float32
        told = torch.empty(len(logits), self.vocab_size) if self._ranks.rank else logits.contiguous()
        self._ranks.broadcast(told)
        return told


class Staged:
    """A `GraphedDecoder` that is given batches which lie anywhere."""

    def __init__(self, decoder: GraphedDecoder) -> None:
        self._decoder = decoder

    def forward(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        inputs = self._decoder.inputs.part(0, len(batch.input_ids))
        for name, values in inputs._asdict().items():
            values.copy_(getattr(batch, name))
        return self._decoder.forward(dataclasses.replace(batch, **inputs._asdict()), kv)


def load_share(ranks: RankGroup, model: str, settings: dict[str, Any]) -> Told:
    return Told(ranks, load_decoder(open_checkpoint(model), Settings(**settings), ranks=ranks))


def shared_logits(
    ranks: RankGroup, model: str, settings: dict[str, Any], ids: list[list[int]], seed: int = 0
) -> tuple[str, np.ndarray]:
    """What kind of decoder it is, and float32 [n, V], all logits of all sequences; pipes take no tensors."""
    decoder = load_share(ranks, model, settings)
    return decoder.kind, torch.cat(logits_in_random_steps(decoder, ids, seed=seed)).numpy()


def shared_generation(
    ranks: RankGroup, model: str, settings: dict[str, Any], prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    return generate(load_share(ranks, model, settings), prompts, num_tokens=num_tokens, chunk=3)


def ranks_sum(ranks: RankGroup, terms: np.ndarray) -> np.ndarray:
    """Each rank has one of [n, T, E]."""
    x = torch.from_numpy(terms[ranks.rank].copy())
    ranks.all_reduce(x)
    return x.numpy()


def logits_of_some(
    ranks: RankGroup, model: str, settings: dict[str, Any], ids: list[int], wanted: list[list[int]]
) -> list[np.ndarray]:
    """float32 [L, V] of a prompt's tokens, once for each choice of them."""
    decoder = load_share(ranks, model, settings)
    driver = ForwardDriver(decoder, rows=1)
    batch = driver._batch({driver.add(ids): len(ids)})
    parts = [dataclasses.replace(batch, prompt_logits_index=torch.tensor(each, dtype=torch.int64)) for each in wanted]
    return [decoder.forward(part, driver.kv).numpy().copy() for part in parts]
