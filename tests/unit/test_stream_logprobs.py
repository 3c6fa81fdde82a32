"""What responses say of single tokens: ids and log-probabilities, exactly those of the tokens that count."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.checkpoint import open_checkpoint
from backend_lib.request import FinishReason, GenerationRequest, OutputOptions, SamplingParams
from backend_lib.router import tensors
from backend_lib.router.extent import extent_for
from backend_lib.router.siblings import Siblings
from backend_lib.router.stream import Stream
from backend_lib.router.text import TextStream
from backend_lib.router.token_outputs import TokenNews, TokenOutputs, token_text
from tests.support.arena import close, new_arena
from tests.support.checkpoints import hash_text, make_hash_checkpoint
from tests.support.hashing import EOS_ID
from tests.support.senders import ListSender

MAX_TOKENS, PROMPT_LEN, VOCAB = 24, 3, 300
ALL = OutputOptions(stream=True, logprobs=True, cumulative_logprob=True, output_ids=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = make_hash_checkpoint(tmp_path_factory.mktemp("hash"), vocab_size=VOCAB)
    return open_checkpoint(str(folder)).tokenizer


@pytest.fixture(scope="module")
def arena():
    arena = new_arena(heap_bytes=1 << 16)
    yield arena
    close(arena)


def logprob(token: int, place: int) -> float:
    """Each row's own, and exact in float32."""
    return -(token + place / 64)


class Life:
    """A stream whose worker writes rows as the real one does: a token's before the token is published."""

    def __init__(self, arena, tokenizer, *, output: OutputOptions = ALL, sender=None, **sampling: Any) -> None:
        sampling = {"logprobs": 2} | sampling
        self.slots, self.sender = arena.slots, sender or ListSender()
        request = GenerationRequest(request_id="", text="P", sampling=SamplingParams(**sampling), output=output)
        extent = extent_for(request.sampling, 0, PROMPT_LEN, MAX_TOKENS, is_leader=True, vocab_size=VOCAB)
        lengths = {"generation": 1, "prompt_len": PROMPT_LEN, "max_tokens": MAX_TOKENS}
        self.slots.write(0, extent.fields(0) | lengths)
        self.stream = Stream(request, self.sender, 0, 1)
        text = TextStream(
            tokenizer,
            request.sampling.stop,
            include_stop=request.sampling.include_stop_str_in_output,
            skip_special_tokens=request.sampling.skip_special_tokens,
        )
        self.stream.begin(text, PROMPT_LEN, tokens=TokenOutputs(output, token_text(tokenizer)))
        self.length = 0
        for rows in (self.slots.logprobs(0), self.slots.prompt_logprobs(0)):
            if rows is not None:
                rows["rank"] = 99  # what an earlier owner left behind
                rows["logprobs"] = -math.inf

    def publish(self, ids: list[int], finish: FinishReason = FinishReason.NONE) -> Life:
        rows = self.slots.logprobs(0)
        for place, token in enumerate(ids, self.length):
            self.slots.output_ids(0)[place] = token
            if rows is not None:
                rows[place] = row(token, place, rows["token_ids"].shape[1])
        self.length += len(ids)
        self.slots.publish(0, 1, self.length, finish, released=False)
        self.stream.advance(self.slots, lambda stream: None)
        return self

    @property
    def logprobs(self) -> list[Any]:
        return [json.loads(reply.tokens.logprobs) for reply in self.sender.replies]

    @property
    def ids(self) -> list[int]:
        return [token for reply in self.sender.replies for token in reply.tokens.token_ids]


def row(token: int, place: int, width: int) -> tuple[int, list[int], list[float]]:
    """Its token is the second likeliest, but for the last place."""
    others = [token + 1, token, *range(token + 2, token + width)][: width - 1]
    return 2, [token, *others], [logprob(each, place) for each in (token, *others)]


def entry(token: int, place: int) -> dict[str, Any]:
    """What a client reads for two alternatives."""
    return {
        str(token): {"logprob": logprob(token, place), "rank": 2, "decoded_token": hash_text([token])},
        str(token + 1): {"logprob": logprob(token + 1, place), "rank": 1, "decoded_token": hash_text([token + 1])},
    }


def test_each_response_has_the_rows_of_its_tokens(arena, tokenizer):
    life = Life(arena, tokenizer).publish([5]).publish([6, 7]).publish([8], FinishReason.LENGTH)
    assert life.logprobs == [[entry(5, 0)], [entry(6, 1), entry(7, 2)], [entry(8, 3)]]
    assert list(life.logprobs[0][0]) == ["5", "6"], "the chosen token stands first"
    assert [reply.tokens.token_ids for reply in life.sender.replies] == [(5,), (6, 7), (8,)]
    sums = [sum(logprob(token, place) for place, token in enumerate(range(5, 5 + count))) for count in (1, 3, 4)]
    assert [reply.tokens.cumulative_logprob for reply in life.sender.replies] == sums


def test_all_at_once_without_streaming(arena, tokenizer):
    output = OutputOptions(logprobs=True, cumulative_logprob=True, output_ids=True)
    life = Life(arena, tokenizer, output=output).publish([5]).publish([6], FinishReason.LENGTH)
    assert life.logprobs == [[entry(5, 0), entry(6, 1)]]


def test_the_chosen_token_alone(arena, tokenizer):
    life = Life(arena, tokenizer, logprobs=0).publish([5], FinishReason.LENGTH)
    assert life.logprobs == [[{"5": entry(5, 0)["5"]}]]


def test_the_token_that_ends_it_has_a_row_and_no_text(arena, tokenizer):
    life = Life(arena, tokenizer).publish([5, 6, EOS_ID], FinishReason.EOS)
    assert life.sender.text == hash_text([5, 6]) and life.ids == [5, 6, EOS_ID]
    assert len(life.logprobs[0]) == 3
    assert life.logprobs[0][2][str(EOS_ID)]["decoded_token"] == "<eos>"


@pytest.mark.parametrize("include", [False, True])
def test_everything_ends_with_the_stop_string(arena, tokenizer, include):
    stop = (hash_text([7, 8]),)
    life = Life(arena, tokenizer, stop=stop, include_stop_str_in_output=include)
    life.publish([5, 6]).publish([7, 8, 9, 10], FinishReason.LENGTH)
    assert life.sender.text == hash_text([5, 6, 7, 8] if include else [5, 6])
    assert life.ids == [5, 6, 7, 8] and life.sender.num_tokens == 4
    assert life.logprobs == [[entry(5, 0), entry(6, 1)], [entry(7, 2), entry(8, 3)]]
    total = sum(logprob(token, place) for place, token in enumerate([5, 6, 7, 8]))
    assert life.sender.replies[-1].tokens.cumulative_logprob == total


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_text_where_the_end_is_to_be_kept(arena, tokenizer, include):
    life = Life(arena, tokenizer, include_stop_str_in_output=include).publish([5, 6], FinishReason.STOP_TOKEN)
    assert life.sender.text == hash_text([5, 6] if include else [5])
    assert life.ids == [5, 6]


def test_special_tokens_are_text_for_those_who_want_them(arena, tokenizer):
    life = Life(arena, tokenizer, skip_special_tokens=False).publish([5, EOS_ID, 6], FinishReason.LENGTH)
    assert life.sender.text == hash_text([5]) + "<eos>" + hash_text([6])


def test_what_json_has_no_number_for(arena, tokenizer):
    life = Life(arena, tokenizer)
    life.slots.output_ids(0)[0] = 5
    life.slots.logprobs(0)[0] = (1, [5, 6, 7], [-math.inf, -1, -math.inf])
    life.slots.publish(0, 1, life.length + 1, FinishReason.LENGTH, released=False)
    life.stream.advance(life.slots, lambda stream: None)
    (reply,) = life.sender.replies
    values = [each["logprob"] for each in json.loads(reply.tokens.logprobs)[0].values()]
    assert values == [-9999.0, -1.0, -9999.0] and reply.tokens.cumulative_logprob == -9999.0


def test_the_prompts_rows_come_once_and_the_first_token_has_none(arena, tokenizer):
    output = OutputOptions(stream=True, prompt_logprobs=True)
    life = Life(arena, tokenizer, output=output, logprobs=None, prompt_logprobs=1)
    for place, token in enumerate([20, 21, 22]):
        life.slots.prompt_logprobs(0)[place] = row(token, place, 2)
    life.publish([5]).publish([6], FinishReason.LENGTH)
    first, last = (json.loads(reply.tokens.prompt_logprobs) for reply in life.sender.replies)
    assert first == [None, entry(21, 1), entry(22, 2)] and last is None


def test_nothing_is_said_that_was_not_asked_for(arena, tokenizer):
    life = Life(arena, tokenizer, output=OutputOptions(stream=True), logprobs=None).publish([5], FinishReason.LENGTH)
    assert life.sender.replies[0].tokens == TokenNews()


@settings(max_examples=60, deadline=None)
@given(
    ids=st.lists(st.integers(5, 9), min_size=1, max_size=MAX_TOKENS),
    stop=st.lists(st.integers(5, 9), max_size=2),
    interval=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
)
def test_however_it_is_cut_the_rows_are_those_of_the_tokens(arena, tokenizer, ids, stop, interval, seed):
    output = OutputOptions(
        stream=True, logprobs=True, cumulative_logprob=True, output_ids=True, stream_interval=interval
    )
    life = Life(arena, tokenizer, output=output, stop=(hash_text(stop),) if stop else ())
    rng, left = random.Random(seed), list(ids)
    while left:
        count = rng.randint(1, len(left))
        step, left = left[:count], left[count:]
        life.publish(step, FinishReason.NONE if left else FinishReason.LENGTH)
    count = life.sender.wait(0).num_tokens
    assert life.ids == ids[:count]
    pieces = [piece for piece in life.logprobs if piece is not None]
    assert [each for piece in pieces for each in piece] == [entry(token, i) for i, token in enumerate(ids[:count])]
    for reply in life.sender.replies:
        assert reply.num_tokens == len(reply.tokens.token_ids)


# As tensors


def test_arrays_of_a_response(arena, tokenizer):
    life = Life(arena, tokenizer).publish([5, 6], FinishReason.LENGTH)
    arrays = tensors.response(life.sender.replies)
    assert json.loads(arrays["logprobs"][0]) == [entry(5, 0), entry(6, 1)]
    assert (arrays["cumulative_logprob"].dtype, arrays["cumulative_logprob"].shape) == (np.float32, (1,))
    assert arrays["cumulative_logprob"][0] == np.float32(logprob(5, 0) + logprob(6, 1))
    assert (arrays["output_ids"].dtype, arrays["output_ids"].tolist()) == (np.int32, [5, 6])
    assert set(arrays) == {"text_output", "logprobs", "cumulative_logprob", "output_ids"}


def test_ids_of_several_sequences_stand_one_behind_the_other(arena, tokenizer):
    output = OutputOptions(output_ids=True, num_output_tokens=True, logprobs=True, cumulative_logprob=True)
    sender = ListSender()
    siblings = Siblings(sender, GenerationRequest(request_id="", sampling=SamplingParams(n=2), output=output))
    for index, ids in ((1, [8]), (0, [5, 6])):
        Life(arena, tokenizer, output=output, sender=siblings.voice(index)).publish(ids, FinishReason.LENGTH)
    arrays = tensors.response(*sender.sibling_replies[0])
    assert arrays["output_ids"].tolist() == [5, 6, 8]
    assert arrays["num_output_tokens"].tolist() == [2, 1]
    assert [json.loads(each) for each in arrays["logprobs"]] == [[entry(5, 0), entry(6, 1)], [entry(8, 0)]]
    assert arrays["cumulative_logprob"].tolist() == [logprob(5, 0) + logprob(6, 1), logprob(8, 0)]


def test_a_sequence_without_news_has_no_tokens_and_keeps_its_sum(arena, tokenizer):
    sender = ListSender()
    siblings = Siblings(sender, GenerationRequest(request_id="", sampling=SamplingParams(n=2), output=ALL))
    for index, ids in ((0, [5]), (1, [8, 9])):
        Life(arena, tokenizer, sender=siblings.voice(index)).publish(ids, FinishReason.LENGTH)
    arrays = tensors.response(*sender.sibling_replies[1])
    assert arrays["output_ids"].tolist() == [8, 9]
    assert [json.loads(each) for each in arrays["logprobs"]] == [None, [entry(8, 0), entry(9, 1)]]
    assert arrays["cumulative_logprob"][0] == np.float32(logprob(5, 0))
    assert arrays["sequence_index"].tolist() == [1]


def test_a_shorter_sequences_row_is_filled_with_zeros(arena, tokenizer):
    sender, output = ListSender(), OutputOptions(logprobs=True)
    siblings = Siblings(sender, GenerationRequest(request_id="", sampling=SamplingParams(n=2), output=output))
    for index, ids in ((0, [5]), (1, [8, 9])):
        Life(arena, tokenizer, output=output, sender=siblings.voice(index)).publish(ids, FinishReason.LENGTH)
    arrays = tensors.response(*sender.sibling_replies[0], tensors.TRTLLM)
    assert arrays["output_log_probs"].tolist() == [[[logprob(5, 0), 0], [logprob(8, 0), logprob(9, 1)]]]
    assert arrays["cum_log_probs"].tolist() == [[logprob(5, 0), logprob(8, 0) + logprob(9, 1)]]
    assert {array.shape[0] for name, array in arrays.items() if name != "text_output"} == {1}
    assert arrays["text_output"].shape == (2,)
