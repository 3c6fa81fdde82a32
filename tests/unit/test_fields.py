"""Each field reaches the one place it is for, under every name it has, and nothing else changes."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from backend_lib.config import Settings
from backend_lib.request import GenerationRequest, Grammar, GrammarKind, OutputOptions, SamplingParams
from backend_lib.router.contract import parse_request
from backend_lib.router.fields import ALIASES, FIELDS
from backend_lib.router.refusals import RequestError

VOCAB = 1024
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA)
PLAIN = GenerationRequest(request_id="", text="hi", output=OutputOptions(echo_prompt=True))
OF_SCHEMA = Grammar(kind=GrammarKind.JSON_SCHEMA, source=SCHEMA_TEXT)

# What a client sends, and what it becomes where the field says.
REACHES: dict[str, tuple[Any, Any]] = {
    "max_tokens": (7, 7),
    "min_tokens": (3, 3),
    "temperature": (0.5, 0.5),
    "top_k": (4, 4),
    "top_p": (0.25, 0.25),
    "min_p": (0.125, 0.125),
    "repetition_penalty": (1.25, 1.25),
    "presence_penalty": (-2, -2.0),
    "frequency_penalty": (2, 2.0),
    "logit_bias": ({"5": 1.5, "1023": -100}, ((5, 1.5), (1023, -100.0))),
    "bad_words": (["one", "two"], ("one", "two")),
    "allowed_token_ids": ([3, 5, 1023], (3, 5, 1023)),
    "seed": (9, 9),
    "ignore_eos": (True, True),
    "n": (3, 3),
    "stop": (["a", "b"], ("a", "b")),
    "stop_token_ids": ([5, 6], (5, 6)),
    "include_stop_str_in_output": (True, True),
    "skip_special_tokens": (False, False),
    "guided_json": (SCHEMA, OF_SCHEMA),
    "guided_regex": ("a+", Grammar(kind=GrammarKind.REGEX, source="a+")),
    "guided_choice": (["x", "y"], Grammar(kind=GrammarKind.CHOICE, source='["x", "y"]')),
    "guided_grammar": ('root ::= "a"', Grammar(kind=GrammarKind.EBNF, source='root ::= "a"')),
    "guided_json_object": (True, Grammar(kind=GrammarKind.JSON_OBJECT)),
    "structured_outputs": ({"regex": "b*", "json": None}, Grammar(kind=GrammarKind.REGEX, source="b*")),
    "guided_decoding": ({"regex": "b*", "json": None}, Grammar(kind=GrammarKind.REGEX, source="b*")),
    "response_format": ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, OF_SCHEMA),
    "stream": (True, True),
    "return_finish_reason": (True, True),
    "return_num_input_tokens": (True, True),
    "return_num_output_tokens": (True, True),
    "return_num_cached_tokens": (True, True),
    "return_output_ids": (True, True),
    "return_reasoning_content": (True, True),
    "return_tool_calls": (True, True),
    "stream_interval": (8, 8),
    "request_priority": (-3, -3),
    "disable_prompt_cache": (True, True),
    "dp_rank": (2, 2),
}
# Fields that are no attribute of their own, or stand for more than one: the tests below are theirs.
OTHERS = {
    "best_of", "logprobs", "prompt_logprobs", "return_logprobs", "return_cumulative_logprob", "return_prompt_logprobs",
    "guided_decoding_guide_type", "guided_decoding_guide", "exclude_input_in_output", "pad_id", "cancel",
    # tests/unit/test_prompts.py
    "input_ids", "input_lengths", "messages", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt",
}  # fmt: skip


def in_json(**values: Any) -> GenerationRequest:
    return parse(sampling_parameters=json.dumps(values))


def parse(**parameters: Any) -> GenerationRequest:
    return parse_request(
        {"text_input": np.array([b"hi"], dtype=object)}, parameters, "", 0, Settings(data_parallel=4), VOCAB
    )


def error(**values: Any) -> str:
    with pytest.raises(RequestError) as caught:
        in_json(**values)
    return str(caught.value)


def expected(name: str) -> GenerationRequest:
    """A request in which the field alone differs."""
    field, value = FIELDS[name], REACHES[name][1]
    if field.noun is SamplingParams:
        return replace(PLAIN, sampling=replace(PLAIN.sampling, **{field.attribute: value}))
    if field.noun is OutputOptions:
        echo = name != "stream"
        return replace(PLAIN, output=replace(PLAIN.output, **{field.attribute: value}, echo_prompt=echo))
    return replace(PLAIN, **{field.attribute: value})


@pytest.mark.parametrize("name", REACHES)
def test_a_field_reaches_its_place_and_no_other(name):
    assert in_json(**{name: REACHES[name][0]}) == expected(name) != PLAIN


@pytest.mark.parametrize("name", REACHES)
def test_a_field_as_text_in_a_parameter(name):
    value = REACHES[name][0]
    assert parse(**{name: value if isinstance(value, str) else json.dumps(value)}) == expected(name)


@pytest.mark.parametrize(("alias", "name"), [pair for pair in ALIASES.items() if pair[1] in REACHES])
def test_another_name_is_the_same_field(alias, name):
    assert in_json(**{alias: REACHES[name][0]}) == expected(name)
    twice = {alias: REACHES[name][0], name: REACHES[name][0]}
    assert error(**twice) == f"'{alias}' and '{name}' are the same field; allowed is one of them"
    assert in_json(**twice | {alias: None}) == expected(name)


@pytest.mark.parametrize(("alias", "name"), [pair for pair in ALIASES.items() if pair[1] in REACHES])
def test_an_error_has_the_name_that_the_client_used(alias, name):
    assert error(**{alias: [[[]]]}).startswith(f"'{alias}' is [[[]]]; ")


def test_errors_of_two_fields_have_the_names_that_the_client_used():
    assert (
        error(min_length=5, request_output_len=4)
        == "'min_length' is 5; allowed is at most request_output_len, which is 4"
    )
    assert error(sampling_param_best_of=3, num_return_sequences=2).endswith(
        "as many as 'num_return_sequences', which is 2"
    )
    assert error(stream=True, sampling_param_exclude_input_from_output=False).startswith(
        "'sampling_param_exclude_input_from_output' is False; "
    )
    assert in_json(bad=["x"]).called("bad_words") == "bad" and in_json().called("bad_words") == "bad_words"


@pytest.mark.parametrize(
    "off",
    [{"runtime_top_p": 0.0}, {"sampling_param_top_p": "0"}, {"end_id": -1}, {"end_id": [-1]}, {"len_penalty": 0.0}],
)
def test_what_tensorrtllm_backends_clients_send_for_none(off):
    assert in_json(**off) == PLAIN
    ((alias, value),) = off.items()
    name = ALIASES[alias]
    array = np.array([[0.0 if value == "0" else value]], dtype=np.float32).reshape(1, 1)
    tensors = {"text_input": np.array([[b"hi"]], dtype=object), name: array}
    assert parse_request(tensors, {}, "", 0, Settings(contract="trtllm"), VOCAB) == PLAIN
    assert error(**{name: value}).startswith(f"'{name}' is ")


def test_every_supported_field_is_tested_here():
    assert {name for name, field in FIELDS.items() if field.is_supported} == REACHES.keys() | OTHERS


def test_each_attribute_has_one_field():
    """But the grammar, which many spell."""
    places = [(field.noun, field.attribute) for field in FIELDS.values() if field.noun]
    assert {place for place in places if places.count(place) > 1} == {(SamplingParams, "grammar")}
    assert set(ALIASES).isdisjoint(FIELDS)


def test_best_of_is_as_many_as_n():
    assert in_json(best_of=1) == PLAIN
    assert in_json(best_of=3, n=3) == in_json(n=3)
    assert error(best_of=3, n=2) == "'best_of' is 3; allowed is as many as 'n', which is 2"


@pytest.mark.parametrize(
    ("given", "logprobs", "prompt_logprobs"),
    [
        ({"logprobs": 5}, None, None),
        ({"logprobs": 5, "return_logprobs": True}, 5, None),
        ({"return_logprobs": True}, 0, None),
        ({"return_log_probs": True}, 0, None),
        ({"logprobs": True, "return_logprobs": True}, 0, None),
        ({"logprobs": False, "return_logprobs": True}, 0, None),
        ({"logprobs": "2", "return_cumulative_logprob": True}, 2, None),
        ({"return_cumulative_logprob": True}, 0, None),
        ({"prompt_logprobs": 3}, None, None),
        ({"prompt_logprobs": 3, "return_prompt_logprobs": True}, None, 3),
        ({"return_prompt_logprobs": True, "logprobs": 4, "return_logprobs": True}, 4, 0),
    ],
)
def test_log_probabilities_are_computed_for_those_who_see_them(given, logprobs, prompt_logprobs):
    request = in_json(**given)
    assert (request.sampling.logprobs, request.sampling.prompt_logprobs) == (logprobs, prompt_logprobs)
    assert request.output.logprobs is ("return_logprobs" in given or "return_log_probs" in given)
    assert request.output.cumulative_logprob is ("return_cumulative_logprob" in given)
    assert request.output.prompt_logprobs is ("return_prompt_logprobs" in given)


def test_ids_of_several_sequences_come_with_their_lengths():
    assert in_json(n=2, return_output_ids=True).output.num_output_tokens
    assert not in_json(return_output_ids=True).output.num_output_tokens


# What the output must match


@pytest.mark.parametrize(
    ("value", "grammar"),
    [
        ({"guided_json": SCHEMA_TEXT}, OF_SCHEMA),
        ({"guided_json_object": False}, None),
        ({"guided_choice": '["x"]'}, Grammar(kind=GrammarKind.CHOICE, source='["x"]')),
        ({"guided_choice": "x"}, Grammar(kind=GrammarKind.CHOICE, source='["x"]')),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, OF_SCHEMA),
        ({"structured_outputs": json.dumps({"json": SCHEMA, "json_object": False})}, OF_SCHEMA),
        ({"structured_outputs": {"choice": ["é"]}}, Grammar(kind=GrammarKind.CHOICE, source='["\\u00e9"]')),
        ({"structured_outputs": {"grammar": "g"}}, Grammar(kind=GrammarKind.EBNF, source="g")),
        ({"structured_outputs": {"json_object": True}}, Grammar(kind=GrammarKind.JSON_OBJECT)),
        ({"structured_outputs": {}}, None),
        ({"guided_decoding": json.dumps({"json": SCHEMA, "whitespace_pattern": None, "backend": None})}, OF_SCHEMA),
        ({"guided_decoding": {"choice": ["x"]}}, Grammar(kind=GrammarKind.CHOICE, source='["x"]')),
        (
            {
                "structured_outputs": {
                    "json": SCHEMA,
                    "disable_any_whitespace": False,
                    "disable_fallback": False,
                    "disable_additional_properties": None,
                }
            },
            OF_SCHEMA,
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "text"}, "guided_json": SCHEMA}, OF_SCHEMA),
        ({"response_format": {"type": "json_object"}}, Grammar(kind=GrammarKind.JSON_OBJECT)),
        ({"response_format": '{"type": "json_object"}'}, Grammar(kind=GrammarKind.JSON_OBJECT)),
        ({"guided_decoding_guide_type": "json"}, Grammar(kind=GrammarKind.JSON_OBJECT)),
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": SCHEMA_TEXT}, OF_SCHEMA),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "a|b"},
            Grammar(kind=GrammarKind.REGEX, source="a|b"),
        ),
        (
            {"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "root"},
            Grammar(kind=GrammarKind.EBNF, source="root"),
        ),
    ],
)
def test_spellings_of_a_grammar(value, grammar):
    found = in_json(**value).sampling.grammar
    assert found == grammar
    assert found is None or found.field in value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "'guided_json' and 'guided_regex' both"),
        (
            {"response_format": {"type": "json_object"}, "guided_decoding_guide_type": "json"},
            "'response_format' and 'guided_decoding_guide_type' both",
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "(json and regex exclude each other)"),
        ({"structured_outputs": {"jsn": SCHEMA}}, "(unknown key 'jsn')"),
        (
            {"structured_outputs": {"regex": "a", "disable_fallback": True}},
            "(disable_fallback is only supported at false)",
        ),
        (
            {"guided_decoding": {"disable_any_whitespace": "true"}},
            "(disable_any_whitespace is only supported at false)",
        ),
        ({"guided_decoding": {"json": SCHEMA, "whitespace_pattern": " ?"}}, "(whitespace_pattern is only supported at"),
        ({"guided_decoding": {"regex": "a"}, "guided_regex": "a"}, "'guided_regex' and 'guided_decoding' both"),
        ({"structured_outputs": "x"}, "'structured_outputs' is 'x'; allowed is a JSON object"),
        ({"guided_json": "{"}, "'guided_json' is '{'; allowed is a JSON schema"),
        ({"guided_json": [1]}, "'guided_json' is [1]; allowed is"),
        ({"guided_json": '{"a": NaN}'}, "'guided_json' is "),
        ({"guided_regex": ""}, "(it is empty)"),
        ({"guided_regex": 5}, "'guided_regex' is 5; allowed is a regular expression of at most 65536 bytes"),
        ({"guided_regex": "é" * 32_769}, "(it has 65538 bytes)"),
        ({"guided_choice": []}, "(there is none, or an empty one)"),
        ({"guided_choice": ["a", ""]}, "(there is none, or an empty one)"),
        ({"guided_choice": ["a" * 40_000, "b" * 40_000]}, "'guided_choice' is "),
        ({"guided_grammar": "\ud800"}, "'guided_grammar' is "),
        ({"response_format": {"type": "xml"}}, "(type is none of text, json_object, json_schema)"),
        ({"response_format": {"type": "json_schema"}}, "(json_schema has no schema)"),
        ({"guided_decoding_guide_type": "xml"}, "allowed is one of json, json_schema, regex, ebnf_grammar"),
        ({"guided_decoding_guide": "a"}, "'guided_decoding_guide_type' is missing"),
        ({"guided_decoding_guide_type": "regex"}, "'guided_decoding_guide' is None; allowed is what"),
        ({"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": "{"}, "'guided_decoding_guide' is '{'"),
        ({"guided_decoding_guide_type": "json", "guided_decoding_guide": "{}"}, "json takes none"),
    ],
)
def test_what_is_no_grammar_or_more_than_one(value, words):
    assert words in error(**value)


# Ranges


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("min_p", [-0.01, 1.01, "x"], "a number from 0 to 1"),
        ("repetition_penalty", [0, -1, 1e-5, 1e7], "a number from 0.0001 to 1000000"),
        ("presence_penalty", [-2.1, 2.1], "a number from -2 to 2"),
        ("frequency_penalty", [-2.1, 2.1], "a number from -2 to 2"),
        ("logprobs", [-1, 21, 1.5, "x", []], "a whole number from 0 to 20, or true or false"),
        ("prompt_logprobs", [-1, 21], "a whole number from 0 to 20, or true or false"),
        (
            "logit_bias",
            [{"1024": 1}, {"-1": 1}, {"x": 1}, {"5": float("inf")}, {"5": "x"}, {"5": 1, "05": 2}, [5], "5", "{",
             {str(i): 0 for i in range(1025)}],
            "a JSON object of at most 1024 token ids from 0 to 1023, each with a number, cut to lie from -100 to 100",
        ),
        ("allowed_token_ids", [[1024], [-1], [1] * 1025, "x"], "a list of at most 1024 whole numbers, each from 0"),
        (
            "bad_words",
            [["x"] * 65, ["x" * 1025], [5], '["a"', '["a", 1]', ' [ "a"]]', [["a"], ["b"]], [[[""]]]],
            "a string or a list of at most 64 strings, each at most 1024 characters long",
        ),
        ("stop", ['["a",', '[""'], "(it begins like a JSON list of strings, and is none)"),
        ("guided_choice", ["[1, 2]", "[", "[a, b]", ' ["a"'], "(it begins like a JSON list of strings, and is none)"),
        ("detokenize", [False], "only true is supported"),
        ("spaces_between_special_tokens", [False, "0"], "only true is supported"),
        ("flat_logprobs", [True], "only false is supported"),
        ("output_kind", [1, 2], "only 0 is supported"),
        ("truncate_prompt_tokens", [-1, 5], "only null is supported"),
        ("logits_processors", [["x"], []], "only null is supported"),
        ("extra_args", [{"a": 1}], "only null is supported"),
        ("lora_name", ["x"], "only null is supported"),
        ("length_penalty", [0.5], "only 1 is supported"),
        ("beam_width", [2], "only 1 is supported"),
        ("return_context_logits", [True], "only false is supported"),
        ("return_generation_logits", [1], "only false is supported"),
        ("return_perf_metrics", ["true"], "only false is supported"),
        ("return_kv_cache_reuse_stats", [True], "only false is supported"),
        ("use_beam_search", [True], "only false is supported"),
        ("early_stopping", [True], "only false is supported"),
        ("image", [["x"]], "only an empty list is supported"),
    ],
)  # fmt: skip
def test_what_a_field_refuses(name, values, words):
    for value in values:
        message = error(**{name: value})
        assert message.startswith(f"'{name}' is ") and words in message, message


def test_what_is_off_may_be_said():
    off = {
        "length_penalty": 1,
        "beam_width": 1,
        "use_beam_search": False,
        "early_stopping": 0,
        "image": [],
        "pad_id": 2,
        "detokenize": True,
        "spaces_between_special_tokens": "true",
        "flat_logprobs": False,
        "output_kind": 0,
        "return_context_logits": False,
        "return_generation_logits": 0,
        "return_perf_metrics": "false",
        "return_kv_cache_reuse_stats": False,
    }
    assert in_json(**off) == PLAIN


@pytest.mark.parametrize("name", [*FIELDS, *ALIASES])
def test_null_is_nothing(name):
    assert in_json(**{name: None}) == PLAIN


def test_a_bias_beyond_the_bounds_is_the_bound():
    assert in_json(logit_bias={"5": 101, "6": -1e9}).sampling.logit_bias == ((5, 100.0), (6, -100.0))


@pytest.mark.parametrize("name", ["stop", "stop_words", "bad_words", "bad"])
def test_empty_texts_are_none(name):
    attribute = FIELDS[ALIASES.get(name, name)].attribute
    for none in ("", [""], [[""]], [], ["", ""], '[""]', '[[""]]'[1:-1]):
        assert in_json(**{name: none}) == PLAIN
    assert getattr(in_json(**{name: ["", "a"]}).sampling, attribute) == ("a",)
    assert getattr(in_json(**{name: [["a", "b"]]}).sampling, attribute) == ("a", "b")


@pytest.mark.parametrize("text", ["[", "[INST]", "[1, 2]", "[]]", 'a["', '"['])
def test_a_stop_string_may_begin_with_a_bracket(text):
    assert in_json(stop=text).sampling.stop == parse(stop=text).sampling.stop == (text,)


def test_lists_of_ids_may_be_as_long_as_the_vocabulary():
    ids = list(range(VOCAB))
    assert in_json(allowed_token_ids=ids).sampling.allowed_token_ids == tuple(ids)
    assert in_json(logit_bias={str(i): 1 for i in ids}).sampling.logit_bias == tuple((i, 1.0) for i in ids)


def test_every_attribute_that_a_field_names_exists():
    for field in FIELDS.values():
        if field.noun:
            assert field.attribute in {spec.name for spec in fields(field.noun)}
        assert field.help or not field.is_supported
