"""A runtime in the place of CUDA's that does what is launched as late as it may, in any order that streams allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class LateCuda:
    """Work waits in its stream until somebody synchronises; then streams take turns at random until that is done.

    Memory of the host is poisoned when it is made, and the device's by what its stream still had to do there.
    """

    torch_device = torch.device("cpu")

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[Stream] = []

    def stream(self) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def event(self) -> Event:
        return Event(self)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8)

    def device_memory(self, num_bytes: int, stream: Stream) -> torch.Tensor:
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        stream.launch(lambda: memory.fill_(0xA5))
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        stream.launch(lambda: target.copy_(source))

    def run_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            ready = [stream for stream in self.streams if stream.can_go_on()]
            assert ready, "what is waited for was never launched, or streams wait for one another"
            self.random.choice(ready).go_on()

    def run_some(self) -> None:
        for _ in range(self.random.randint(0, 4)):
            ready = [stream for stream in self.streams if stream.can_go_on()]
            if ready:
                self.random.choice(ready).go_on()


class Stream:
    """Launches in order. A wait is a launch that cannot go on before its event's record of that time has."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Callable[[], bool], Callable[[], Any]]] = deque()

    def launch(self, work: Callable[[], Any]) -> None:
        self.queue.append((lambda: True, work))

    def wait_event(self, event: Event) -> None:
        recorded = event.recorded
        self.queue.append((lambda: event.done >= recorded, lambda: None))

    def can_go_on(self) -> bool:
        return bool(self.queue) and self.queue[0][0]()

    def go_on(self) -> None:
        self.queue.popleft()[1]()


class Event:
    def __init__(self, runtime: LateCuda) -> None:
        self.runtime = runtime
        self.recorded = self.done = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded

        def arrive() -> None:
            self.done = max(self.done, number)

        stream.launch(arrive)

    def synchronize(self) -> None:
        recorded = self.recorded
        self.runtime.run_until(lambda: self.done >= recorded)
