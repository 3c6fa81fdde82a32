"""Groups of ranks in processes of their own, which compute together over Gloo as workers do."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backend_lib.worker.process_groups import RankGroup

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
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
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
