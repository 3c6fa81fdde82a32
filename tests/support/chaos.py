"""Requests of every kind from many clients at once, each of which knows what it must be answered by the hash model."""

from __future__ import annotations

import json
import random
import socket
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.support.checkpoints import hash_text
from tests.support.clients import HttpClient, Response, events, grpc_stream
from tests.support.engine import EOS, Expected, expected_answer, expected_ids, random_prompt
from tests.support.server import RunningServer

LONG = 300  # tokens: such a request is under way for a while
USAGE = {"return_finish_reason": True, "return_num_output_tokens": True, "exclude_input_in_output": True}
TIMED_OUT = "the request's timeout of {} us has passed"
# What a client gets wrong, and what the error must speak of.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"), ({"temperature": -1.0}, "temperature"), ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": "many"}, "max_tokens"), ({"no_such_field": 1}, "no_such_field"), ({"n": 1000}, "'n'"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"), ({"seed": -1.5}, "seed"),
]  # fmt: skip


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    parameters: dict[str, Any]

    @property
    def text(self) -> str:
        return hash_text(self.prompt)

    @property
    def expected(self) -> Expected:
        names = ("max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "stop", "temperature", "seed")
        return expected_answer(self.prompt, **{key: self.parameters[key] for key in names if key in self.parameters})


class Questioner:
    """Draws questions; the same for the same seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prefixes = [random_prompt(random.Random(number), 60, 60) for number in range(3)]  # all clients' alike

    def prompt(self) -> list[int]:
        prefix = self._rng.choice([[], self._rng.choice(self._prefixes)])
        return prefix + random_prompt(self._rng, 1, 30)

    def question(self) -> Question:
        """One of any kind: greedy or drawn, with or without what ends it early."""
        rng, prompt = self._rng, self.prompt()
        parameters = {"max_tokens": rng.choice([1, 5, 40, 150]), "temperature": 0, **self._manners()}
        parameters |= rng.choice([{}, {"ignore_eos": True}, {"min_tokens": 3, "max_tokens": 60}])
        parameters |= rng.choice([{}, {}, self._drawn(), {"stop_token_ids": [9, 11]}])
        if rng.random() < 0.3:
            text = Question(prompt, parameters).expected.text
            at = rng.randrange(len(text)) if text else 0
            parameters["stop"] = [text[at : at + rng.choice([1, 2])] or "ε"]
        return Question(prompt, parameters)

    def long(self) -> Question:
        """One that goes on until somebody ends it, or nearly."""
        return Question(self.prompt(), {"max_tokens": LONG, "ignore_eos": True, "temperature": 0, **self._manners()})

    def _drawn(self) -> dict[str, Any]:
        return {"temperature": 4.0, "seed": self._rng.getrandbits(63), "max_tokens": self._rng.choice([8, 30])}

    def _manners(self) -> dict[str, Any]:
        """What changes when the answer comes, and not what it says."""
        rng = self._rng
        return {
            **rng.choice([{}, {}, {"request_priority": rng.randint(-5, 5)}]),
            **rng.choice([{}, {}, {"stream_interval": rng.randint(2, 9)}]),
            **rng.choice([{}, {}, {}, {"disable_prompt_cache": True}]),
        }


class ChaosClient:
    """One client. Each `ask_…` is a request from start to end; AssertionError when it did not end as it must."""

    def __init__(self, server: RunningServer, rng: random.Random) -> None:
        self._rng = rng
        self._http, self._http_url, self._grpc_url = HttpClient(server.http_url), server.http_url, server.grpc_url
        self._questioner = Questioner(rng)

    def ask_http(self) -> None:
        question = self._questioner.question()
        answer = self._http.generate(question.text, **_spelt(question.parameters), **USAGE)
        _check_whole(question, [answer["text_output"]], answer["finish_reason"], [answer["num_output_tokens"]])

    def ask_http_stream(self) -> None:
        question = self._questioner.question()
        pieces = list(self._http.stream(question.text, **_spelt(question.parameters), **USAGE))
        assert not any("error" in piece for piece in pieces), pieces[-1]
        texts, tokens = ([piece[name] for piece in pieces] for name in ("text_output", "num_output_tokens"))
        _check_whole(question, texts, pieces[-1]["finish_reason"], tokens)

    def ask_grpc(self) -> None:
        self._ask_grpc(stream=False)

    def ask_grpc_stream(self) -> None:
        self._ask_grpc(stream=True)

    def _ask_grpc(self, *, stream: bool) -> None:
        question = self._questioner.question()
        responses = self._responses(question, stream=stream)
        assert not responses[-1].error, responses[-1].error
        tokens = [int(each.outputs["num_output_tokens"][0]) for each in responses]
        _check_whole(question, [each.text for each in responses], responses[-1].finish_reason, tokens)

    def ask_siblings(self) -> None:
        """Several sequences, each of which draws its own tokens."""
        n, tokens, seed = self._rng.randint(2, 3), self._rng.choice([5, 20]), self._rng.getrandbits(63)
        draw = {"temperature": 4.0, "seed": seed}
        question = Question(self._questioner.prompt(), {"n": n, "max_tokens": tokens, "ignore_eos": True, **draw})
        responses = self._responses(question, stream=self._rng.random() < 0.5)
        assert not responses[-1].error, responses[-1].error
        for sequence in range(n):
            text = "".join(each.outputs["text_output"][sequence].decode() for each in responses)
            ids = expected_ids(question.prompt, tokens, sequence=sequence, **draw)
            assert text == hash_text([token for token in ids if token != EOS]), (question, sequence, text)

    def ask_and_cancel(self) -> None:
        """Over gRPC, before the first token or after some."""
        question, text = self._questioner.long(), ""
        with grpc_stream(self._grpc_url) as stream:
            stream.send(question.text, stream=True, sampling_parameters=json.dumps(question.parameters))
            for _ in range(self._rng.choice([0, 1, 10])):
                response = stream.next()
                assert not response.error, response.error
                text += response.text
                if response.final:
                    break
            stream.cancel()
        _check_begun(question, text)

    def ask_and_leave(self) -> None:
        """Over HTTP, in the midst of the answer."""
        question, text = self._questioner.long(), ""
        with self._http.open_stream(question.text, **_spelt(question.parameters)) as answer:
            pieces = events(answer)
            for piece in (next(pieces, None) for _ in range(self._rng.choice([1, 10]))):
                text += piece["text_output"] if piece else ""
        _check_begun(question, text)

    def ask_and_leave_at_once(self) -> None:
        """Over HTTP, before the first token."""
        question, url = self._questioner.long(), urlsplit(self._http_url)
        body = json.dumps({"text_input": question.text, "stream": True, **_spelt(question.parameters)}).encode()
        head = f"POST /v2/models/llm/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((url.hostname or "", url.port or 0), timeout=10) as connection:
            connection.sendall(head.encode() + body)

    def ask_until_a_deadline(self) -> None:
        question, timeout_us = self._questioner.long(), self._rng.choice([1_000, 50_000, 400_000])
        if self._rng.random() < 0.5:
            body = {**_spelt(question.parameters), "stream": True, "timeout": timeout_us}
            # The status is that of the first response, which may be the error.
            answer = self._http.post(question.text, endpoint="generate_stream", **body)
            pieces = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
            text, error = "".join(each.get("text_output", "") for each in pieces), pieces[-1].get("error", "")
        else:
            responses = self._responses(question, stream=True, timeout_us=timeout_us)
            error = responses[-1].error
            text = "".join(each.text for each in responses if not each.error)
        if error:
            assert error == TIMED_OUT.format(timeout_us), error
            _check_begun(question, text)
        else:
            assert text == question.expected.text, (question, text)

    def ask_what_is_wrong(self) -> None:
        mistake, word = self._rng.choice(MISTAKES)
        if self._rng.random() < 0.5:
            status, words = self._http.error(hash_text([5]), **mistake)
            assert status == 400 and word in words, (status, words)
        else:
            with grpc_stream(self._grpc_url) as stream:
                words = stream.error(hash_text([5]), sampling_parameters=json.dumps(mistake))
                assert word in words, words

    def _responses(self, question: Question, *, stream: bool, timeout_us: int | None = None) -> list[Response]:
        with grpc_stream(self._grpc_url) as connection:
            text = json.dumps(question.parameters)
            return connection.ask(
                question.text, stream=stream, timeout_us=timeout_us, sampling_parameters=text, **USAGE
            )


KINDS: dict[str, Callable[[ChaosClient], None]] = {
    name: each for name, each in vars(ChaosClient).items() if name.startswith("ask_")
}


@dataclass
class MixedLoad:
    """Clients, each in a thread of its own, that ask one request after another until `end`."""

    server: RunningServer
    seed: int
    clients: int = 14
    asked: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(self.clients)
        ]
        for thread in self._threads:
            thread.start()

    def end(self, timeout: float = 60.0) -> None:
        """No more requests; those under way must end by themselves. AssertionError when one ended wrongly."""
        self._over.set()
        for thread in self._threads:
            thread.join(timeout)
        assert not any(thread.is_alive() for thread in self._threads), f"a request hangs; {self.faults}"
        assert not self.faults, f"seed {self.seed}: {len(self.faults)} faults\n" + "\n".join(self.faults[:5])

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self.seed}/{number}")
        client = ChaosClient(self.server, rng)
        while not self._over.is_set():
            name = rng.choice(list(KINDS))
            fault = _fault_of(KINDS[name], client)
            with self._lock:
                self.asked[name] += 1
                if fault:
                    self.faults.append(f"client {number}, {name}: {fault}")


def _fault_of(ask: Callable[[ChaosClient], None], client: ChaosClient) -> str:
    try:
        ask(client)
    except Exception:  # whatever a client meets is a fault of the server's: it is told at the end, with all others
        return traceback.format_exc(limit=4)
    return ""


def _check_whole(question: Question, texts: list[str], finish: str, tokens: list[int]) -> None:
    expected, text = question.expected, "".join(texts)
    got = (text, sum(tokens), finish)
    assert got == (expected.text, expected.num_tokens, expected.finish.text), (question, got, expected)


def _check_begun(question: Question, text: str) -> None:
    assert question.expected.text.startswith(text), (question, text)


def _spelt(parameters: dict[str, Any]) -> dict[str, Any]:
    """As the generate endpoint takes them, which knows no lists."""
    return {key: json.dumps(value) if isinstance(value, list) else value for key, value in parameters.items()}
