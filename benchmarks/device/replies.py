"""The router's side of `benchmarks.device.serving`, in a process of its own as in serving: the real group, streams and
reply threads, with senders that take as long as a round trip through Triton.

    python -m benchmarks.device.replies ARENA COMMANDS REPLIES MAX_RUNNING FOLDER SECONDS

Reads the slots as a line of JSON, says `ready`, waits for a line, and tells at the end what was sent.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from backend_lib.arena import Arena, Doorbell
from backend_lib.checkpoint import open_checkpoint
from backend_lib.request import GenerationRequest, OutputOptions, SamplingParams
from backend_lib.router.group import Group
from backend_lib.router.reply import ErrorKind, Reply
from backend_lib.router.reply_pool import ReplyPool
from backend_lib.router.router import REPLY_THREADS
from backend_lib.router.stream import Stream
from backend_lib.router.text import TextStream


class CostlySender:
    """A send keeps its thread, and nothing else, for so long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.tokens = self.replies = 0
        self.first = self.last = 0.0
        self.error = ""
        self.done = threading.Event()

    def send(self, reply: Reply) -> None:
        time.sleep(self._seconds)
        self.last = time.perf_counter()
        self.first = self.first or self.last
        self.tokens += reply.num_tokens
        self.replies += 1
        if reply.finish:
            self.done.set()

    def fail(self, kind: ErrorKind, message: str) -> None:
        self.error = f"{kind}: {message}"
        self.done.set()

    def is_cancelled(self) -> bool:
        return False


class Router:
    """Posts all streams at once; `drain` is its doorbell thread."""

    def __init__(self, arena: Arena, commands: Doorbell, replies: Doorbell, max_running: int) -> None:
        self._slots = arena.slots
        self._group = Group(arena, 0, replies=replies, max_running=max_running, on_released=lambda stream: None)
        self._group.bells = [commands]
        self._streams: dict[int, Stream] = {}
        self._pool = ReplyPool(REPLY_THREADS, lambda stream: stream.advance(self._slots, self._group.abort))

    def add(self, stream: Stream) -> None:
        stream.arrival = len(self._streams)
        self._streams[stream.slot] = stream

    def start(self) -> None:
        threading.Thread(target=self._drain_forever, daemon=True).start()
        self._group.came_up()
        for stream in self._streams.values():
            self._group.submit(stream)

    def _drain_forever(self) -> None:
        while True:
            self._group.replies.wait()
            touched = self._group.dirty.drain()
            streams = [*self._streams.values()] if touched is None else [self._streams[ref.slot] for ref in touched]
            for stream in streams:
                self._pool.mark(stream)
                published = self._slots.published(stream.slot, stream.generation)
                if published:
                    self._group.touched(stream, published)


def main() -> None:
    *numbers, folder, seconds = sys.argv[1:]
    arena_fd, commands, replies, max_running = map(int, numbers)
    arena = Arena.attach(arena_fd)
    router = Router(arena, Doorbell(commands), Doorbell(replies), max_running)
    tokenizer = open_checkpoint(folder).tokenizer
    senders = []
    for slot, generation, max_tokens in json.loads(sys.stdin.readline()):
        senders.append(CostlySender(float(seconds)))
        request = GenerationRequest(
            request_id="", sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            output=OutputOptions(stream=True),
        )  # fmt: skip
        stream = Stream(request, senders[-1], slot, generation)
        prompt_ids = arena.slots.prompt_ids(slot).tolist()
        stream.begin(TextStream(tokenizer, prompt_ids=prompt_ids), len(prompt_ids))
        router.add(stream)
    print("ready", flush=True)
    sys.stdin.readline()
    started, cpu = time.perf_counter(), time.process_time()
    router.start()
    for sender in senders:
        sender.done.wait()
    print(json.dumps(_told(senders, started, time.process_time() - cpu)), flush=True)


def _told(senders: list[CostlySender], started: float, cpu: float) -> dict[str, float | str]:
    seconds = max(sender.last for sender in senders) - started
    firsts = sorted(sender.first - started for sender in senders)
    return {
        "seconds": seconds, "tokens": sum(sender.tokens for sender in senders),
        "replies": sum(sender.replies for sender in senders), "router CPU share": cpu / seconds,
        "median TTFT s": firsts[len(firsts) // 2], "failed": next((each.error for each in senders if each.error), ""),
    }  # fmt: skip


if __name__ == "__main__":
    main()
