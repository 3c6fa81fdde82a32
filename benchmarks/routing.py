"""What choosing a group by its prefix cache is worth: the router's choice beside taking turns, in one run.

Two copies of a model behind a real server. **Conversations**: each turn sends all that was said before and a little
more. **Shared beginnings**: requests of one of several system prompts. Whoever takes turns names the group of each
request by `dp_rank`, one after the other; else the router chooses. Every pair of workload and choice has a server of
its own, so that it finds empty caches, and asks the same.

The hash model, the default, computes nothing: its hit rates are exact, its times say nothing of a model's.

    python -m benchmarks.routing [--model smollm2] [--clients 8] [--conversations 24] [--turns 6] [--kv-tokens 16000]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.support.checkpoints import make_hash_checkpoint
from tests.support.clients import GrpcStream, grpc_stream
from tests.support.server import running_server

GROUPS = 2
SAID, ANSWERED = 100, 40  # tokens of a message and of its answer
SYSTEM_PROMPTS, SYSTEM, QUESTION = 24, 600, 60
TOKENS = range(200, 1000)  # ids that are text in both models


class Answer(NamedTuple):
    prompt: int
    cached: int
    ttft: float  # seconds
    ids: list[int]


class Conversation:
    """A task: `prompt` is what is to be sent next, None when all has been said."""

    def __init__(self, rng: random.Random, turns: int, beginning: list[int], message: int) -> None:
        self._rng, self._left, self._message = rng, turns, message
        self.prompt = beginning + self._words()

    def answered(self, ids: list[int]) -> bool:
        """Take the answer; whether there is more to say."""
        self._left -= 1
        self.prompt += [*ids, *self._words()]
        return self._left > 0

    def _words(self) -> list[int]:
        return [self._rng.choice(TOKENS) for _ in range(self._message)]


def conversations(args: argparse.Namespace) -> list[Conversation]:
    return [Conversation(random.Random(seed), args.turns, [], SAID) for seed in range(args.conversations)]


def shared_beginnings(args: argparse.Namespace) -> list[Conversation]:
    """As many requests as the conversations have turns, of one turn each."""
    rng = random.Random(0)
    beginnings = [[rng.choice(TOKENS) for _ in range(SYSTEM)] for _ in range(SYSTEM_PROMPTS)]
    count = args.conversations * args.turns
    return [Conversation(random.Random(seed), 1, list(rng.choice(beginnings)), QUESTION) for seed in range(count)]


WORKLOADS = {"conversations": conversations, "shared beginnings": shared_beginnings}
CHOICES = ("the router's", "taking turns")


class Load:
    """Clients that take any task each, so that the turns of one conversation lie apart."""

    def __init__(self, tasks: list[Conversation], *, takes_turns: bool) -> None:
        self._tasks = tasks
        self._rng = random.Random(0)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._takes_turns = takes_turns
        self.answers: list[Answer] = []

    def run(self, url: str, clients: int) -> None:
        threads = [threading.Thread(target=self._client, args=(url,)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, url: str) -> None:
        with grpc_stream(url) as stream:
            while task := self._next():
                rank = {"dp_rank": next(self._numbers) % GROUPS} if self._takes_turns else {}
                answer = ask(stream, task.prompt, rank)
                more = task.answered(answer.ids)
                with self._lock:
                    self.answers.append(answer)
                    self._tasks.extend([task] if more else [])

    def _next(self) -> Conversation | None:
        with self._lock:
            return self._tasks.pop(self._rng.randrange(len(self._tasks))) if self._tasks else None


def ask(stream: GrpcStream, prompt: list[int], rank: dict[str, int]) -> Answer:
    parameters = {"max_tokens": ANSWERED, "temperature": 0, "ignore_eos": True} | rank
    wants = {"return_output_ids": True, "return_num_cached_tokens": True}
    started = time.monotonic()
    stream.send(None, input_ids=np.array(prompt, np.int32), stream=True, parameters=parameters, **wants)
    first = stream.next()
    ttft = time.monotonic() - started
    responses = [first] if first.final or first.error else [first, *stream.rest()]
    assert not responses[-1].error, responses[-1].error
    ids = [token for response in responses for token in response.outputs["output_ids"].tolist()]
    return Answer(len(prompt), int(first.outputs["num_cached_tokens"][0]), ttft, ids)


def measured(model: str, workload: str, choice: str, args: argparse.Namespace) -> str:
    """A line of the table."""
    settings = {"data_parallel": GROUPS, "kv_tokens": args.kv_tokens, "max_running": args.clients}
    load = Load(WORKLOADS[workload](args), takes_turns=choice == CHOICES[1])
    with running_server(model=model, settings=settings) as server:
        load.run(server.grpc_url, args.clients)
    prompt, cached = (sum(getattr(each, name) for each in load.answers) for name in ("prompt", "cached"))
    ttft = statistics.median(each.ttft for each in load.answers) * 1000
    cells = (workload, choice, len(load.answers), prompt, cached, f"{cached / prompt:.1%}", f"{ttft:.0f}")
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the hash model if not given")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--kv-tokens", type=int, default=16_000, help="of each copy")
    args = parser.parse_args()
    print("| workload | choice | requests | prompt tokens | found | hit rate | TTFT p50, ms |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(make_hash_checkpoint(Path(folder) / "hash"))
        for workload, choice in itertools.product(WORKLOADS, CHOICES):
            print(measured(model, workload, choice, args), flush=True)


if __name__ == "__main__":
    main()
