"""A stream's way back to its client: text, counts, stop strings, verdicts, and exactly one last response."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.checkpoint import open_checkpoint
from backend_lib.request import FinishReason, GenerationRequest, OutputOptions, SamplingParams
from backend_lib.router.reply import ErrorKind, Verdict
from backend_lib.router.stream import Stream
from backend_lib.router.text import TextStream
from tests.support.arena import close, new_arena
from tests.support.checkpoints import hash_text, make_hash_checkpoint
from tests.support.senders import ListSender

CANCELLED = Verdict(FinishReason.CANCELLED, ErrorKind.CANCELLED, "the request was cancelled")
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_checkpoint(str(make_hash_checkpoint(tmp_path_factory.mktemp("hash"), vocab_size=300))).tokenizer


@pytest.fixture(scope="module")
def arena():
    arena = new_arena()
    yield arena
    close(arena)


class Life:
    """A stream, its client, and the worker's half of its slot."""

    def __init__(self, arena, tokenizer, *, stop: tuple[str, ...] = (), sender: ListSender | None = None, **output):
        self.slots, self.sender = arena.slots, sender or ListSender()
        self.slots.write(0, {"generation": 1, "output_offset": 0, "max_tokens": MAX_TOKENS})
        request = GenerationRequest(
            request_id="", text="PROMPT", sampling=SamplingParams(stop=stop), output=OutputOptions(**output)
        )
        self.stream = Stream(request, self.sender, 0, 1)
        self.stream.begin(TextStream(tokenizer, stop), 6)
        self.stopped: list[Stream] = []
        self.length = 0

    def publish(self, ids: list[int], finish: FinishReason = FinishReason.NONE, released: bool = False) -> Life:
        self.slots.output_ids(0)[self.length : self.length + len(ids)] = ids
        self.length += len(ids)
        self.slots.publish(0, 1, self.length, finish, released=released)
        return self.advance()

    def advance(self) -> Life:
        self.stream.advance(self.slots, self.stopped.append)
        return self

    @property
    def pieces(self) -> list[tuple[str, int]]:
        return [(reply.text, reply.num_tokens) for reply in self.sender.replies]


def test_a_streaming_client_gets_each_token_as_it_comes(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, stream=True).publish([5]).publish([6, 7]).advance().publish([8], FinishReason.LENGTH)
    assert life.pieces == [(hash_text([5]), 1), (hash_text([6, 7]), 2), (hash_text([8]), 1)]
    assert [reply.finish for reply in life.sender.replies] == [FinishReason.NONE] * 2 + [FinishReason.LENGTH]
    assert {reply.num_input_tokens for reply in life.sender.replies} == {6}


def test_a_client_that_does_not_stream_gets_all_at_once(arena, tokenizer) -> None:
    life = Life(arena, tokenizer).publish([5]).publish([6]).publish([7], FinishReason.LENGTH)
    assert life.pieces == [(hash_text([5, 6, 7]), 3)]


def test_the_prompt_comes_first_when_it_is_wanted(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, echo_prompt=True).publish([5], FinishReason.LENGTH)
    assert life.pieces == [("PROMPT" + hash_text([5]), 1)]


def test_an_interval_gathers_tokens_and_the_last_response_brings_the_rest(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, stream=True, stream_interval=3)
    for token in range(10, 17):
        life.publish([token])
    life.publish([17], FinishReason.LENGTH)
    assert [count for _, count in life.pieces] == [3, 3, 2]
    assert life.sender.text == hash_text(list(range(10, 18)))


@pytest.mark.parametrize("finish", [FinishReason.EOS, FinishReason.STOP_TOKEN])
def test_the_token_that_ends_it_counts_and_is_not_text(arena, tokenizer, finish: FinishReason) -> None:
    life = Life(arena, tokenizer, stream=True).publish([5]).publish([6, 7], finish)
    assert life.pieces == [(hash_text([5]), 1), (hash_text([6]), 2)]


def test_the_last_response_comes_even_without_text(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, stream=True).publish([5]).publish([7], FinishReason.EOS)
    assert life.pieces == [(hash_text([5]), 1), ("", 1)]


def test_a_stop_string_drops_what_comes_after_it_and_stops_the_worker(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, stop=(hash_text([7, 8]),), stream=True)
    life.publish([5]).publish([6, 7]).publish([8, 9, 10])
    assert life.sender.text == hash_text([5, 6]) and life.sender.num_tokens == 4
    assert life.sender.finish is FinishReason.STOP_STRING
    assert life.stopped == [life.stream] and life.stream.verdict == Verdict(FinishReason.STOP_STRING)
    life.publish([11], FinishReason.CANCELLED, released=True)
    assert life.pieces == [(hash_text([5]), 1), (hash_text([6]), 2), ("", 1)]
    assert not life.sender.faults


def test_a_stop_string_in_the_tokens_of_the_last_step_wins_over_its_length(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, stop=(hash_text([7]),)).publish([6, 7, 8], FinishReason.LENGTH)
    assert life.sender.finish is FinishReason.STOP_STRING and life.pieces == [(hash_text([6]), 2)]


def test_text_that_might_have_become_a_stop_string_comes_at_the_end(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, stop=(hash_text([7, 8]),), stream=True).publish([6]).publish([7])
    assert life.sender.text == hash_text([6])
    life.publish([9], FinishReason.EOS)
    assert life.sender.text == hash_text([6, 7]) and life.sender.finish is FinishReason.EOS and not life.stopped


def test_a_verdict_with_an_error_ends_it_and_what_is_pending_is_not_sent(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, stream=True).publish([5])
    assert life.stream.decide(CANCELLED)
    life.publish([6]).publish([7], FinishReason.LENGTH)
    assert life.sender.wait(0).error == (ErrorKind.CANCELLED, "the request was cancelled")
    assert life.sender.text == hash_text([5])


def test_the_first_verdict_stays(arena, tokenizer) -> None:
    life = Life(arena, tokenizer)
    assert life.stream.decide(CANCELLED)
    assert not life.stream.decide(Verdict(FinishReason.DEADLINE, ErrorKind.UNAVAILABLE, "late"))
    assert life.advance().sender.error[0] is ErrorKind.CANCELLED


def test_no_verdict_after_the_answer(arena, tokenizer) -> None:
    life = Life(arena, tokenizer).publish([5], FinishReason.LENGTH)
    assert not life.stream.decide(CANCELLED)
    life.advance()
    life.stream.fail(ErrorKind.INTERNAL, "late")
    assert life.sender.wait(0).error is None


def test_the_workers_error_reaches_the_client(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, stream=True).publish([5])
    arena.slots.headers["error"][0] = "könnte nicht".encode()
    life.publish([], FinishReason.ERROR, released=True)
    assert life.sender.wait(0).error == (ErrorKind.INTERNAL, "könnte nicht")


def test_nothing_is_taken_from_another_owner_of_the_slot(arena, tokenizer) -> None:
    life = Life(arena, tokenizer, stream=True)
    life.slots.output_ids(0)[:2] = [5, 6]
    life.slots.publish(0, 2, 2, FinishReason.LENGTH, released=False)
    assert life.advance().pieces == []


def test_retired_once_and_only_when_answered_and_released(arena, tokenizer) -> None:
    stream = Life(arena, tokenizer).stream
    found = []
    for answered, released in [(False, False), (True, False), (False, True)]:
        stream.answered, stream.released = answered, released
        found.append(stream.may_retire())
    stream.answered = stream.released = True
    assert not any(found)
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        found.append(stream.may_retire())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(True) == 1


def test_a_send_that_fails_is_the_last(arena, tokenizer) -> None:
    def no_client(reply) -> None:
        raise RuntimeError("gone")

    life = Life(arena, tokenizer, stream=True, sender=ListSender(no_client))
    with pytest.raises(RuntimeError, match="gone"):
        life.publish([5], FinishReason.LENGTH)
    life.advance()
    assert life.stream.answered and not life.sender.faults


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(5, 9), min_size=1, max_size=MAX_TOKENS - 1),
    stops=st.lists(st.lists(st.integers(5, 9), min_size=1, max_size=3), max_size=2),
    finish=st.sampled_from([FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH]),
    stream=st.booleans(),
    interval=st.integers(1, 5),
    seed=st.integers(0, 1 << 20),
)
def test_however_it_is_cut_the_answer_is_the_same(arena, tokenizer, ids, stops, finish, stream, interval, seed) -> None:
    stop = tuple(hash_text(each) for each in stops)
    life = Life(arena, tokenizer, stop=stop, stream=stream, stream_interval=interval)
    rng, left = random.Random(seed), list(ids)
    while left:
        count = rng.randint(1, len(left))
        step, left = left[:count], left[count:]
        life.publish(step, FinishReason.NONE if left else finish)
    sender = life.sender.wait(0)
    text = hash_text(ids if finish is FinishReason.LENGTH else ids[:-1])
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(each) for each in stop)]
    if ends:
        cut = min(ends[0] - len(each) for each in stop if text[: ends[0]].endswith(each))
        assert (sender.text, sender.num_tokens, sender.finish) == (text[:cut], ends[0], FinishReason.STOP_STRING)
    else:
        assert (sender.text, sender.num_tokens, sender.finish) == (text, len(ids), finish)
    assert all(count >= interval and text for text, count in life.pieces[:-1])
    assert stream or len(sender.replies) == 1
