"""What a stream knows of its request when it has ended: counts, and the times of its first worker."""

from __future__ import annotations

import time

import pytest

from backend_lib.checkpoint import open_checkpoint
from backend_lib.request import FinishReason, GenerationRequest
from backend_lib.router.finished import Finished
from backend_lib.router.reply import ErrorKind, Verdict
from backend_lib.router.stream import Stream
from backend_lib.router.text import TextStream
from tests.support.arena import close, new_arena
from tests.support.checkpoints import make_hash_checkpoint
from tests.support.senders import ListSender

CANCELLED = Verdict(FinishReason.CANCELLED, ErrorKind.CANCELLED, "the request was cancelled")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_checkpoint(str(make_hash_checkpoint(tmp_path_factory.mktemp("hash"), vocab_size=300))).tokenizer


class Life:
    """A stream, and the worker that serves it."""

    def __init__(self, arena, tokenizer) -> None:
        self.slots = arena.slots
        self.slots.write(0, {"generation": 1, "output_offset": 0, "max_tokens": 40, "arrival_ns": 100})
        self.stream = Stream(GenerationRequest(request_id="id", text=""), ListSender(), 0, 1)
        self.stream.begin(TextStream(tokenizer), 6)
        self.length = 0

    def stamp(self, **times: int) -> Life:
        for name, value in times.items():
            self.slots.headers[name][0] = value
        return self

    def publish(self, num_tokens: int, finish: FinishReason = FinishReason.NONE) -> Life:
        self.slots.output_ids(0)[self.length : self.length + num_tokens] = 7
        self.length += num_tokens
        self.slots.publish(0, 1, self.length, finish, released=False)
        self.stream.advance(self.slots, lambda stream: None)
        return self

    @property
    def end(self) -> Finished:
        assert self.stream.finished
        return self.stream.finished


@pytest.fixture
def life(tokenizer):
    arena = new_arena()
    yield Life(arena, tokenizer)
    close(arena)


def test_the_slot_says_when_what_was(life) -> None:
    life.stamp(first_scheduled_ns=200, first_token_ns=300, cached_tokens=4).publish(1)
    assert life.stream.finished is None
    life.publish(2).stamp(last_token_ns=700).publish(1, FinishReason.LENGTH)
    assert life.end[:6] == ("id", FinishReason.LENGTH, None, 6, 4, 4)
    assert life.end.times[:4] == (100, 200, 300, 700)
    assert 0 <= time.time_ns() - life.end.times.end < 60e9


def test_a_row_given_anew_changes_nothing(life) -> None:
    """After a pause, or in the next worker, which also finds more of the sequence in its cache."""
    life.stamp(first_scheduled_ns=200, first_token_ns=300, cached_tokens=4).publish(1)
    life.stamp(first_scheduled_ns=900, cached_tokens=6).publish(1, FinishReason.LENGTH)
    assert (life.end.times.scheduled, life.end.cached_tokens) == (200, 4)


def test_a_stage_that_was_not_reached_has_no_time(life) -> None:
    assert life.stream.decide(CANCELLED)
    life.publish(0)
    assert life.end[:6] == ("id", FinishReason.CANCELLED, ErrorKind.CANCELLED, 6, 0, 0)
    assert (life.end.queue_seconds, life.end.ttft_seconds, life.end.inter_token_seconds) == (None, None, None)


def test_a_worker_that_fails_a_request_is_an_error(life) -> None:
    life.publish(0, FinishReason.ERROR)
    assert (life.end.reason, life.end.error) == ("error", ErrorKind.INTERNAL)
