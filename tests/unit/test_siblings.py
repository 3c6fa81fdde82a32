"""n sequences answer one client: one element each, one final response, one error at most."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.request import FinishReason, GenerationRequest, OutputOptions, SamplingParams
from backend_lib.router.reply import ErrorKind, Reply
from backend_lib.router.siblings import Siblings
from tests.support.senders import ListSender


class Client(ListSender):
    """Keeps whether each response was final."""

    def __init__(self) -> None:
        super().__init__()
        self.finals: list[bool] = []

    def send_siblings(self, replies, news, *, final) -> None:
        super().send_siblings(replies, news, final=final)
        self.finals.append(final)


def request(n: int, *, stream: bool) -> GenerationRequest:
    return GenerationRequest(request_id="", text="p", sampling=SamplingParams(n=n), output=OutputOptions(stream=stream))


def reply(text: str, finish: FinishReason = FinishReason.NONE, *, tokens: int = 1) -> Reply:
    return Reply(text, tokens, finish, 3, OutputOptions(stream=True))


def test_news_of_one_sequence_leaves_the_others_elements_empty():
    client = Client()
    siblings = Siblings(client, request(3, stream=True))
    siblings.voice(1).send(reply("b"))
    replies, news = client.sibling_replies[0]
    assert [each.text for each in replies] == ["", "b", ""]
    assert [each.num_tokens for each in replies] == [0, 1, 0]
    assert [each.num_input_tokens for each in replies] == [3, 3, 3]
    assert news == [1]
    assert client.finals == [False]


def test_a_sequence_that_has_ended_keeps_its_reason_and_the_last_one_ends_the_request():
    client = Client()
    siblings = Siblings(client, request(2, stream=True))
    siblings.voice(0).send(reply("a", FinishReason.EOS))
    siblings.voice(1).send(reply("b"))
    siblings.voice(1).send(reply("c", FinishReason.LENGTH))
    reasons = [[each.finish for each in replies] for replies, _ in client.sibling_replies]
    eos, length, none = FinishReason.EOS, FinishReason.LENGTH, FinishReason.NONE
    assert reasons == [[eos, none], [eos, none], [eos, length]]
    assert client.finals == [False, False, True]
    assert [[each.text for each in replies] for replies, _ in client.sibling_replies] == [
        ["a", ""],
        ["", "b"],
        ["", "c"],
    ]


def test_without_streaming_there_is_one_response_in_the_sequences_order():
    client = Client()
    siblings = Siblings(client, request(3, stream=False))
    for index in (2, 0, 1):
        siblings.voice(index).send(reply(f"text {index}", FinishReason.LENGTH, tokens=index + 1))
    ((replies, news),) = client.sibling_replies
    assert [each.text for each in replies] == ["text 0", "text 1", "text 2"]
    assert [each.num_tokens for each in replies] == [1, 2, 3]
    assert news == [0, 1, 2]
    assert client.finals == [True]


@pytest.mark.parametrize("stream", [True, False])
def test_the_first_error_is_the_requests_and_the_others_run_for_nobody(stream):
    client = Client()
    siblings = Siblings(client, request(3, stream=stream))
    assert not siblings.voice(0).is_cancelled()
    siblings.voice(1).fail(ErrorKind.INTERNAL, "first")
    siblings.voice(2).fail(ErrorKind.UNAVAILABLE, "second")
    siblings.voice(0).send(reply("late", FinishReason.EOS))
    assert client.error == (ErrorKind.INTERNAL, "first")
    assert client.sibling_replies == []
    assert not client.faults
    assert siblings.voice(0).is_cancelled()


def test_the_clients_cancellation_is_everybodys():
    client = Client()
    siblings = Siblings(client, request(2, stream=True))
    client.cancelled = True
    assert siblings.voice(0).is_cancelled() and siblings.voice(1).is_cancelled()


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.booleans())
@settings(max_examples=30, deadline=None)
def test_sequences_in_threads_of_their_own_end_in_one_final_response(lengths, stream):
    """The final response is the last, however the threads come: it is sent while no other send is under way."""
    client = Client()
    siblings = Siblings(client, request(len(lengths), stream=stream))

    def speak(index: int, length: int) -> None:
        voice = siblings.voice(index)
        for number in range(1, length + 1):
            if stream or number == length:
                voice.send(reply(f"{index}.{number} ", FinishReason.LENGTH if number == length else FinishReason.NONE))

    threads = [threading.Thread(target=speak, args=pair) for pair in enumerate(lengths)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.wait()
    assert client.finals == [False] * (len(client.finals) - 1) + [True]
    for index, length in enumerate(lengths):
        text = "".join(replies[index].text for replies, _ in client.sibling_replies)
        numbers = range(1, length + 1) if stream else [length]
        assert text == "".join(f"{index}.{number} " for number in numbers)
