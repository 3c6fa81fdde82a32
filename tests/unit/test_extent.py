"""What the worker is given of a request: the parameter blob and the room in the extent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from backend_lib.arena.layout import logprob_row
from backend_lib.request import GenerationRequest, Grammar, GrammarKind, SamplingParams
from backend_lib.router.extent import extent_for, parameter_blob
from backend_lib.router.prompt_encoder import PromptEncoder
from backend_lib.router.refusals import RequestError
from tests.support.arena import close, new_arena
from tests.support.checkpoints import tiny_tokenizer

ALWAYS = {"stop_token_ids": [], "prefix_cache": True, "leader_generation": 7}


def blob(bad_words: list[list[int]] | None = None, **sampling: Any) -> dict[str, Any]:
    request = GenerationRequest(request_id="", text="x", sampling=SamplingParams(**sampling))
    return json.loads(parameter_blob(request, bad_words or [], 7))


def test_a_plain_request_has_a_short_blob():
    assert blob(temperature=0.5, seed=3, stop=("a",), logprobs=2) == ALWAYS


@pytest.mark.parametrize(
    ("name", "value", "written"),
    [
        ("min_p", 0.25, 0.25),
        ("repetition_penalty", 1.5, 1.5),
        ("presence_penalty", -1.0, -1.0),
        ("frequency_penalty", 0.5, 0.5),
        ("logit_bias", ((5, 1.5), (6, -100.0)), [[5, 1.5], [6, -100.0]]),
        ("allowed_token_ids", (4, 5), [4, 5]),
        ("stop_token_ids", (9,), [9]),
        (
            "grammar",
            Grammar(kind=GrammarKind.JSON_SCHEMA, source='{"a": 1}'),
            {"kind": "json_schema", "source": '{"a": 1}'},
        ),
    ],
)
def test_what_differs_from_the_default_is_in_the_blob(name, value, written):
    assert blob(**{name: value}) == ALWAYS | {name: written}


def test_bad_words_are_in_the_blob_as_ids():
    assert blob([[1], [2, 3]]) == ALWAYS | {"bad_words": [[1], [2, 3]]}


# The room


def extent(is_leader: bool = True, **sampling: Any):
    return extent_for(SamplingParams(**sampling), 13, 5, 11, is_leader=is_leader, vocab_size=300)


def test_without_log_probabilities_there_is_no_room_for_them():
    plain = extent()
    assert (plain.logprob_width, plain.prompt_logprob_width) == (0, 0)
    assert plain.num_bytes == 16 + 4 * 5 + 4 * 11


@pytest.mark.parametrize("count", [0, 1, 20])
def test_rows_are_as_wide_as_asked_and_one_for_the_token_itself(count):
    wide = extent(logprobs=count, prompt_logprobs=count)
    row = logprob_row(1 + count).itemsize
    assert wide.logprob_width == wide.prompt_logprob_width == 1 + count
    assert wide.num_bytes == extent().num_bytes + 16 * row


def test_a_row_holds_no_more_than_the_vocabulary():
    assert extent_for(SamplingParams(logprobs=20), 0, 1, 1, is_leader=True, vocab_size=8).logprob_width == 9


def test_the_prompts_rows_are_the_leaders_alone():
    sibling = extent(is_leader=False, logprobs=2, prompt_logprobs=2)
    assert (sibling.logprob_width, sibling.prompt_logprob_width) == (3, 0)


def test_nothing_of_an_extent_overlaps():
    arena, place = new_arena(), extent(logprobs=1, prompt_logprobs=2)
    slots = arena.slots
    lengths = {"params_bytes": 13, "prompt_len": 5, "max_tokens": 11}
    slots.write(0, place.fields(64) | lengths | {"generation": 1})
    parts = [slots.prompt_ids(0), slots.output_ids(0), slots.logprobs(0), slots.prompt_logprobs(0)]
    for value, part in enumerate(parts):
        part.view("u1").reshape(-1)[:] = value + 1
    slots.write_params(0, b"x" * 13)
    assert [set(part.view("u1").reshape(-1).tolist()) for part in parts] == [{1}, {2}, {3}, {4}]
    assert slots.params(0) == b"x" * 13
    assert sum(part.nbytes for part in parts) + 16 == place.num_bytes
    del parts
    close(arena)


# Bad words


def spaced() -> Tokenizer:
    """As SentencePiece: a space is a mark, and one stands before every text."""
    tokens = ["▁", "a", "b", "▁a", "▁ab", "ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    return tokenizer


def words(tokenizer: Tokenizer, *texts: str, vocab_size: int = 512) -> list[list[str]]:
    found = PromptEncoder(tokenizer).bad_words(texts, vocab_size)
    return [[tokenizer.id_to_token(token_id) for token_id in ids] for ids in found]


def test_a_bad_word_is_banned_at_a_beginning_and_after_a_space():
    assert words(spaced(), "a") == [["a"], ["▁a"]]
    assert words(spaced(), " a", "b") == [["a"], ["▁a"], ["b"], ["▁", "b"]]
    assert words(tiny_tokenizer(), "et", "zz") == [["et"], ["Ġ", "et"], ["z", "z"], ["Ġ", "z", "z"]]


def test_blanks_may_be_a_bad_word():
    """Spaces before a word are not part of it; other blanks are, and alone all are the word."""
    assert words(tiny_tokenizer(), "\n") == [["Ċ"], ["Ġ", "Ċ"]]
    assert words(tiny_tokenizer(), "\tet") == [["ĉ", "et"], ["Ġ", "ĉ", "et"]]
    assert words(spaced(), " ") == [["▁"]]


def test_a_bad_word_has_no_beginning_of_sequence():
    assert words(tiny_tokenizer(add_bos=True), "et") == [["et"], ["Ġ", "et"]]


def test_a_bad_word_that_no_token_spells():
    with pytest.raises(RequestError, match=r"'bad_words' has 'x', which has no tokens"):
        words(spaced(), "x")
    with pytest.raises(RequestError, match="'bad_words' has 'zz', which has a token that the model has not"):
        words(tiny_tokenizer(), "zz", vocab_size=10)
