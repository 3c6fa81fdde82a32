"""The ranks of a group as torch.distributed sees them: NCCL between GPUs, Gloo between CPUs.

Each group has a world of its own, so that one that breaks takes no other with it, and in it two process groups: one for
what a step computes, one for decisions, which travel beside it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from backend_lib.arena import Doorbell, StatusBlock
from backend_lib.models.parallel import Alone
from backend_lib.worker.crash_points import reach
from backend_lib.worker.ordered_sum import ordered_all_reduce

_HOST = "127.0.0.1"
# Without a word from us these libraries look for a network, and find the wrong one or none; and what the environment
# says is meant for ranks on several machines.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "GLOO_DEVICE_TRANSPORT": "TCP", "NCCL_SOCKET_IFNAME": "lo"}
# Ranks load at their own pace, and one that hangs is the router's to end.
_FOREVER = timedelta(days=30)


class LostGroup(RuntimeError):
    """Another rank is gone, so this one cannot go on either."""


class Solo(Alone):
    """A group of one."""

    def minimum(self, number: int) -> int:
        return number


SOLO = Solo()


class RankGroup:
    """`Ranks` (see `backend_lib.models.parallel`), and what workers agree by.

    Every method raises LostGroup when another rank is gone.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._device = device
        is_gpu = device.type == "cuda"
        # Two numbers have one sum, whichever is first. On a GPU products depend on what else is in a step anyway.
        self._sums_by_library = is_gpu or size == 2
        backend, own = ("nccl", torch.device("cuda", torch.cuda.current_device())) if is_gpu else ("gloo", None)
        with _lost(rank):
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_FOREVER, device_id=own)
            self._node = dist.new_group(backend=backend, timeout=_FOREVER)

    def all_reduce(self, x: torch.Tensor) -> None:
        with _lost(self.rank):
            if self._sums_by_library:
                dist.all_reduce(x)
            else:
                ordered_all_reduce(x, self.size)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with _lost(self.rank):
            dist.gather(x, parts)
        return None if parts is None else torch.cat(parts, dim=1)

    def broadcast(self, x: torch.Tensor) -> None:
        """Replace a tensor by rank 0's."""
        with _lost(self.rank):
            dist.broadcast(x, src=0)

    def minimum(self, number: int) -> int:
        """Of every rank's number, asked for once. It waits in the store, where a device would be kept busy: another
        rank may load for long."""
        with _lost(self.rank):
            self._store.set(f"number of {self.rank}", str(number))
            return min(int(self._store.get(f"number of {rank}")) for rank in range(self.size))

    def start_broadcast(self, words: np.ndarray) -> Callable[[], np.ndarray]:
        """A `Channel` (see `backend_lib.worker.broadcast`)."""
        with _lost(self.rank):
            if self._device.type == "cuda":
                return _enqueued(words, self._node, self._device)
            work = dist.broadcast(torch.from_numpy(words), src=0, group=self._node, async_op=True)
        return lambda: self._waited(work, words)

    def _waited(self, work: dist.Work, words: np.ndarray) -> np.ndarray:
        with _lost(self.rank):
            work.wait()
        return words


def join(status: StatusBlock, bells: list[Doorbell], rank: int, size: int, device: torch.device) -> RankGroup | Solo:
    """Meet the other ranks. Rank 0 listens on a free port of the loopback, says which in `status`, its own block, and
    rings the others' bells. Who waits uses no processor time: that would look as if something went on."""
    if size == 1:
        return SOLO
    os.environ.update(_LOOPBACK)
    store = _listen(status, bells[1:]) if rank == 0 else _find(status, bells[rank], size)
    ranks = RankGroup(store, rank, size, device)
    reach("joined")
    return ranks


def _listen(status: StatusBlock, others: list[Doorbell]) -> dist.Store:
    """The socket is ours, because torch's own would be open to the network."""
    size = 1 + len(others)
    listener = socket.create_server((_HOST, 0), backlog=size)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        _HOST, port, size, is_master=True, wait_for_workers=False, timeout=_FOREVER, master_listen_fd=listener.detach()
    )
    status.set_port(port)
    for bell in others:
        bell.ring()
    return store


def _find(status: StatusBlock, bell: Doorbell, size: int) -> dist.Store:
    """Rank 0 may be slower; should it end, the router ends this rank too."""
    while not status.port:
        bell.wait()
    return dist.TCPStore(_HOST, status.port, size, is_master=False, timeout=_FOREVER)


@contextmanager
def _lost(rank: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostGroup(f"rank {rank} has lost another rank of its group: {error}") from error


def _enqueued(words: np.ndarray, group: dist.ProcessGroup, device: torch.device) -> Callable[[], np.ndarray]:
    """On the stream that computes, behind what has been launched and before what will be."""
    host = torch.from_numpy(words).pin_memory()
    sent = host.to(device, non_blocking=True)
    dist.broadcast(sent, src=0, group=group)
    host.copy_(sent, non_blocking=True)
    there = torch.cuda.Event()
    there.record()

    def wait() -> np.ndarray:
        there.synchronize()
        return host.numpy()

    return wait
