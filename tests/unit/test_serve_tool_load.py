"""What the load tool asks, and when."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time

import pytest

from backend_lib.checkpoint import open_checkpoint
from benchmarks.serving.client import Trace
from benchmarks.serving.load import Extent, Level, poisson_arrivals, run_load
from benchmarks.serving.workload import WORDS_FILE, Lengths, LoadRequest, Workload, read_lines

WORDS = WORDS_FILE.read_text().split()


def workload(**fields) -> Workload:
    return Workload(**{"input_tokens": Lengths(8, 8), "output_tokens": Lengths(4, 4), "words": WORDS} | fields)


# Workload


@pytest.mark.parametrize(("text", "lengths"), [("128", (128, 128)), ("64:256", (64, 256)), ("1:1", (1, 1))])
def test_lengths(text, lengths):
    assert Lengths.parse(text) == lengths


@pytest.mark.parametrize("text", ["", "0", "5:4", "-3", "a", "1:2:3"])
def test_what_is_no_length(text):
    with pytest.raises(ValueError):
        Lengths.parse(text)


def test_uniform_lengths_cover_their_range():
    requests = itertools.islice(workload(output_tokens=Lengths(3, 6)).requests("concurrency 1"), 200)
    assert {request.sampling["max_tokens"] for request in requests} == {3, 4, 5, 6}


def test_the_same_seed_asks_the_same_and_levels_differ():
    texts = [list(itertools.islice(workload(seed=seed).requests("rate 1"), 20)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] != list(itertools.islice(workload().requests("rate 2"), 20))
    assert len({request.text for request in texts[0]}) == 20


def test_a_word_is_a_token():
    tokenizer = open_checkpoint("smollm2").tokenizer
    for word in WORDS:
        assert len(tokenizer.encode(word).ids) == len(tokenizer.encode(f" {word}").ids) == 1, word
    text = workload(input_tokens=Lengths(300, 300), prefix_tokens=50).request("rate 1", 0).text
    assert len(tokenizer.encode(text).ids) == 350


def test_prefixes_are_shared_within_a_group_at_every_level():
    shared = workload(prefix_tokens=5, prefix_groups=2)
    texts = [shared.request(level, number).text.split() for level in ("rate 1", "rate 2") for number in range(4)]
    prefixes = [tuple(words[:5]) for words in texts]
    assert prefixes == prefixes[:2] * 4
    assert prefixes[0] != prefixes[1]
    assert len({tuple(words[5:]) for words in texts}) == 8
    assert {len(words) for words in texts} == {13}


def test_sampling_is_greedy_unless_it_is_said_otherwise():
    assert workload().request("", 0).sampling == {"temperature": 0, "ignore_eos": True, "max_tokens": 4}
    lines = [{"prompt_tokens": 3, "temperature": 0.5, "max_tokens": 9}]
    request = workload(sampling={"top_k": 5, "temperature": 1}, lines=lines).request("", 0)
    assert request.sampling == {"temperature": 0.5, "ignore_eos": True, "top_k": 5, "max_tokens": 9}
    assert len(request.text.split()) == 3


def test_a_request_file(tmp_path):
    lines = [{"text_input": "Hello", "max_tokens": 3}, {"prompt_tokens": 5, "stop": ["x"]}]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_lines(file) == lines
    requests = list(itertools.islice(workload(lines=lines).requests("rate 1"), 4))
    assert [request.text for request in requests[::2]] == ["Hello", "Hello"], "lines are used in turn"
    assert [request.sampling["max_tokens"] for request in requests] == [3, 4, 3, 4]
    assert requests[1].text != requests[3].text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no request"),
        ('{"prompt_tokens": 1}\n{', ":2: "),
        ('{"max_tokens": 3}', ":1: allowed is a JSON object with either text_input or prompt_tokens"),
        ('{"text_input": "a", "prompt_tokens": 3}', "either text_input or prompt_tokens"),
        ('{"text_input": 3}', "'text_input' is 3; allowed is a string"),
        ('{"prompt_tokens": 0}', "'prompt_tokens' is 0; allowed is a whole number from 1"),
        ('{"prompt_tokens": 2, "max_tokens": "4"}', "'max_tokens' is '4'; allowed is a whole number from 1"),
    ],
)
def test_a_request_file_that_cannot_be_used(tmp_path, text, words):
    (tmp_path / "requests.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"requests\.jsonl") as error:
        read_lines(tmp_path / "requests.jsonl")
    assert words in str(error.value)


# Arrivals


def test_poisson_arrivals():
    arrivals = list(itertools.islice(poisson_arrivals(8.0, seed=3), 20_000))
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 8, rel=0.05), "that of an exponential is its mean"
    in_a_second = [0] * int(arrivals[-1])
    for arrival in arrivals:
        if arrival < len(in_a_second):
            in_a_second[int(arrival)] += 1
    assert statistics.variance(in_a_second) == pytest.approx(8, rel=0.15), "that of Poisson counts is their mean"


def test_arrivals_depend_on_the_seed_only():
    first, again, other = (list(itertools.islice(poisson_arrivals(2.0, seed), 5)) for seed in (1, 1, 2))
    assert first == again != other


# Load, against a server that answers after a fixed time


class FakeServer:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.outstanding = self.most_outstanding = 0

    async def ask(self, request: LoadRequest, planned: float) -> Trace:
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        started = time.perf_counter()
        await asyncio.sleep(self._seconds)
        self.outstanding -= 1
        return Trace(planned, started, [time.perf_counter()], [1], error="")

    def load(self, level: Level, extent: Extent, max_outstanding: int = 1000) -> list[Trace]:
        requests = workload().requests(str(level))
        return asyncio.run(run_load(level, extent, requests, self.ask, max_outstanding=max_outstanding, seed=0))


def test_a_closed_loop_keeps_its_number_of_clients_busy():
    server = FakeServer(0.02)
    assert len(server.load(Level("concurrency", 4), Extent(10, None))) == 10
    assert server.most_outstanding == 4


def test_a_closed_loop_ends_with_its_duration_and_waits_for_answers():
    server = FakeServer(0.2)
    traces = server.load(Level("concurrency", 3), Extent(None, 0.3))
    assert server.outstanding == 0
    assert 3 <= len(traces) <= 6


def test_an_open_loop_sends_without_waiting_for_answers():
    server = FakeServer(0.3)
    traces = server.load(Level("rate", 200), Extent(20, None))
    assert len(traces) == 20
    assert server.most_outstanding > 5


def test_an_open_loop_sends_when_the_arrivals_say():
    traces = FakeServer(0.0).load(Level("rate", 100), Extent(30, None))
    arrivals = list(itertools.islice(poisson_arrivals(100, 0), 30))
    planned = [trace.planned for trace in traces]
    assert [time - planned[0] for time in planned] == pytest.approx([arrival - arrivals[0] for arrival in arrivals])
    assert all(trace.started >= trace.planned - 0.001 for trace in traces)


def test_an_open_loop_bounds_what_is_outstanding():
    server = FakeServer(0.02)
    traces = server.load(Level("rate", float("inf")), Extent(12, None), max_outstanding=3)
    assert (len(traces), server.most_outstanding) == (12, 3)
    assert traces[-1].started - traces[-1].planned > 0.05


def test_an_open_loop_lasts_as_long_as_it_was_asked_to():
    started = time.perf_counter()
    assert FakeServer(0.0).load(Level("rate", 0.001), Extent(None, 0.2)) == []
    assert time.perf_counter() - started >= 0.2
