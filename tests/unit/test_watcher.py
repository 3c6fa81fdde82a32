"""The watcher: deadlines, clients that have gone, a model that is unloaded, and how often it asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from backend_lib.request import FinishReason, GenerationRequest
from backend_lib.router.reply import UNLOADING, ErrorKind
from backend_lib.router.stream import Stream
from backend_lib.router.watcher import Watcher
from tests.support.senders import ListSender


def new_stream(timeout_us: int = 0, sender: ListSender | None = None) -> Stream:
    request = GenerationRequest(request_id="", text="", timeout_us=timeout_us)
    deadline = time.monotonic() + timeout_us / 1e6 if timeout_us else None
    return Stream(request, sender or ListSender(), 0, 1, deadline)


class Verdicts:
    """Streams in the order in which they were found to be over."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.times: list[float] = []
        self._new = threading.Condition()

    def __call__(self, stream: Stream) -> None:
        with self._new:
            self.streams.append(stream)
            self.times.append(time.monotonic())
            self._new.notify_all()

    def wait(self, count: int, timeout: float = 3.0) -> list[Stream]:
        with self._new:
            self._new.wait_for(lambda: len(self.streams) >= count, timeout)
        return self.streams


@contextmanager
def watching(is_serving=lambda: True, drain_seconds: float = 0.0) -> Iterator[tuple[Watcher, Verdicts]]:
    verdicts = Verdicts()
    watcher = Watcher(verdicts, is_serving=is_serving, drain_seconds=drain_seconds)
    try:
        yield watcher, verdicts
    finally:
        watcher.close()


def test_a_passed_deadline_is_unavailable_and_told_once() -> None:
    with watching() as (watcher, verdicts):
        late, patient = new_stream(timeout_us=60_000), new_stream(timeout_us=60_000_000)
        watcher.add(late)
        watcher.add(patient)
        assert verdicts.wait(1) == [late]
        assert late.verdict[:2] == (FinishReason.DEADLINE, ErrorKind.UNAVAILABLE)
        assert "timeout of 60000 us" in late.verdict.words
        assert -0.01 < verdicts.times[0] - late.deadline < 0.5
        time.sleep(0.15)
        assert verdicts.streams == [late] and patient.verdict is None


def test_a_client_that_has_gone_is_noticed() -> None:
    with watching() as (watcher, verdicts):
        stream, other = new_stream(), new_stream()
        watcher.add(stream)
        watcher.add(other)
        time.sleep(0.05)
        stream.sender.cancelled = True
        cancelled = time.monotonic()
        assert verdicts.wait(1) == [stream]
        assert verdicts.times[0] - cancelled < 0.5
        assert stream.verdict.error is ErrorKind.CANCELLED and other.verdict is None


def test_it_asks_neither_the_answered_nor_the_discarded() -> None:
    with watching() as (watcher, verdicts):
        answered, discarded = new_stream(), new_stream()
        answered.answered = True
        answered.sender.cancelled = discarded.sender.cancelled = True
        watcher.add(answered)
        watcher.add(discarded)
        watcher.discard(discarded)
        asked = discarded.sender.asked
        time.sleep(0.15)
        assert answered.sender.asked == 0 and discarded.sender.asked <= asked + 1
        assert answered not in verdicts.streams


def test_asking_is_bounded_however_many_there_are() -> None:
    """A call costs Triton some 0.1 ms: never more than 4,000 a second, and each stream every 40 ms at most."""
    with watching() as (watcher, _):
        streams = [new_stream() for _ in range(400)]
        for stream in streams:
            watcher.add(stream)
        time.sleep(0.6)
    asked = sum(stream.sender.asked for stream in streams)
    assert 2 * len(streams) <= asked <= 0.75 * 4000 + len(streams)
    assert max(stream.sender.asked for stream in streams) - min(stream.sender.asked for stream in streams) <= 1


def test_it_sleeps_while_nothing_lives() -> None:
    calls = []
    with watching(lambda: bool(calls.append(1)) or True) as (watcher, _):
        stream = new_stream()
        watcher.add(stream)
        time.sleep(0.1)
        watcher.discard(stream)
        time.sleep(0.1)
        seen = len(calls), stream.sender.asked
        time.sleep(0.7)
        assert (len(calls), stream.sender.asked) == seen


def test_an_unloaded_models_streams_end_after_the_drain() -> None:
    serving = threading.Event()
    serving.set()
    with watching(serving.is_set, drain_seconds=0.3) as (watcher, verdicts):
        stream = new_stream()
        watcher.add(stream)
        time.sleep(0.1)
        serving.clear()
        unloaded = time.monotonic()
        assert verdicts.wait(1) == [stream]
        assert stream.verdict == UNLOADING
        assert 0.3 <= verdicts.times[0] - unloaded < 2  # asked twice a second


def test_a_no_is_final() -> None:
    """A model that is loaded again is another instance, in another process."""
    answers = iter([True, False, True])
    with watching(lambda: next(answers, True), drain_seconds=0.3) as (watcher, verdicts):
        stream = new_stream()
        watcher.add(stream)
        assert verdicts.wait(1) == [stream]


def test_it_says_once_that_an_unloaded_model_has_drained() -> None:
    serving, drained = threading.Event(), threading.Event()
    serving.set()
    watcher = Watcher(Verdicts(), on_drained=drained.set, is_serving=serving.is_set, drain_seconds=0.1)
    stream = new_stream()
    watcher.add(stream)
    time.sleep(0.1)
    watcher.discard(stream)
    assert not drained.wait(2.5)
    serving.clear()
    assert drained.wait(5)
    watcher.close()


def test_a_sender_that_cannot_be_asked_takes_nobody_elses_deadline_away() -> None:
    class Broken(ListSender):
        def is_cancelled(self) -> bool:
            raise RuntimeError("the response factory is gone")

    with watching() as (watcher, verdicts):
        broken, late = new_stream(sender=Broken()), new_stream(timeout_us=60_000)
        watcher.add(broken)
        watcher.add(late)
        assert set(verdicts.wait(2)) == {broken, late}
        assert broken.verdict.error is ErrorKind.INTERNAL and "factory is gone" in broken.verdict.words


def test_a_verdict_that_cannot_be_carried_out_takes_nobody_elses_deadline_away() -> None:
    told = []

    def failing(stream: Stream) -> None:
        told.append(stream)
        raise RuntimeError("the ring is full")

    watcher = Watcher(failing, is_serving=lambda: True, drain_seconds=0)
    streams = {new_stream(timeout_us=each) for each in (1, 100_000)}
    for stream in streams:
        watcher.add(stream)
    time.sleep(0.4)
    watcher.close()
    assert set(told) == streams and len(told) == 2
