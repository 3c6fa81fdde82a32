"""A reply in a conversation, from the worker's tokens to the client's tensors."""

from __future__ import annotations

import json

import pytest

from backend_lib.request import FinishReason, GenerationRequest, OutputOptions
from backend_lib.router import tensors
from backend_lib.router.chat import ReplyFormat
from backend_lib.router.conversation import Conversation
from backend_lib.router.reply import Reply
from backend_lib.router.stream import Stream
from backend_lib.router.text import TextStream
from tests.support.arena import close, new_arena
from tests.support.checkpoints import tiny_tokenizer
from tests.support.senders import ListSender

CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern"}}\n</tool_call>'
HERMES = ReplyFormat(tool_parser="hermes", reasoning_parser="think")
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def arena():
    arena = new_arena()
    yield arena
    close(arena)


def replies(arena, text: str, step: int, finish: FinishReason = FinishReason.LENGTH, **output: bool) -> list[Reply]:
    """What a client is sent whose model writes `text`, `step` tokens at a time."""
    tokenizer, sender, slots = tiny_tokenizer(), ListSender(), arena.slots
    ids = tokenizer.encode(text).ids
    slots.write(0, {"generation": 1, "output_offset": 0, "max_tokens": MAX_TOKENS})
    options = OutputOptions(finish_reason=True, **output)
    stream = Stream(GenerationRequest(request_id="", text="P", output=options), sender, 0, 1)
    parser = HERMES.parser(prompt="P", tools=options.tool_calls, reasoning=options.reasoning_content)
    stream.begin(TextStream(tokenizer), 1, conversation=Conversation(parser))
    slots.output_ids(0)[: len(ids)] = ids
    for count in [*range(step, len(ids), step), len(ids)]:
        slots.publish(0, 1, count, finish if count == len(ids) else FinishReason.NONE, released=False)
        stream.advance(slots, lambda stream: None)
    return sender.wait(0).replies


def column(sent: list[Reply], name: str) -> list[str]:
    return [tensors.response([reply])[name][0].decode() for reply in sent]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("step", [1, 3, 7, 1000])
def test_calls_of_tools_are_an_output_of_their_own(arena, stream, step):
    sent = replies(arena, f"Let me see. {CALL}", step, stream=stream, tool_calls=True)
    calls = [call for each in column(sent, "tool_calls") for call in json.loads(each)]
    assert [call["function"] for call in calls] == [{"name": "weather", "arguments": '{"place": "Bern"}'}]
    assert calls[0]["id"].startswith("call_")
    assert (
        "".join(column(sent, "text_output")) == "Let me see. " or "".join(column(sent, "text_output")) == "Let me see."
    )
    assert stream or len(sent) == 1


def test_a_call_without_text_is_news(arena):
    """When streaming, a response goes out for a call as it does for text."""
    sent = replies(arena, f"{CALL}{CALL}", 1, stream=True, tool_calls=True)
    assert [len(json.loads(each)) for each in column(sent, "tool_calls")].count(1) == 2


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_reasoning_is_an_output_of_its_own(arena, step):
    sent = replies(arena, "<think>Hm, hm.</think>Yes.", step, stream=True, reasoning_content=True)
    assert "".join(column(sent, "reasoning_content")) == "Hm, hm."
    assert "".join(column(sent, "text_output")) == "Yes."


def test_what_was_not_asked_for_stays_in_the_text(arena):
    sent = replies(arena, f"<think>a</think>{CALL}", 4, stream=True, reasoning_content=True)
    assert "".join(column(sent, "text_output")) == CALL
    assert "tool_calls" not in tensors.response(sent)
    sent = replies(arena, f"<think>a</think>b{CALL}", 4, stream=True, tool_calls=True)
    assert "".join(column(sent, "text_output")) == "<think>a</think>b"


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        (CALL, FinishReason.STOP_TOKEN, "tool_calls"),
        (CALL, FinishReason.LENGTH, "length"),
        ("no call", FinishReason.STOP_TOKEN, "stop"),
    ],
)
def test_why_it_ended(arena, text, finish, reason):
    # The token that ends it is no text, so there is one more.
    sent = replies(arena, f"{text}.", 2, finish, stream=True, tool_calls=True)
    assert column(sent, "finish_reason")[-1] == reason
