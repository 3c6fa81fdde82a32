"""What a client may send, how sources rank, and what an error says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from backend_lib.checkpoint import Checkpoint, HashConfig, SamplingDefaults
from backend_lib.config import Settings
from backend_lib.request import GenerationRequest, OutputOptions, SamplingParams
from backend_lib.router.contract import checkpoint_defaults, parse_request
from backend_lib.router.fields import FIELDS
from backend_lib.router.refusals import RequestError

VOCAB = 49_152
SUPPORTED = [field for field in FIELDS.values() if field.is_supported]


def text(value: str | bytes, shape=(1,)) -> np.ndarray:
    """A STRING tensor as Triton's Python backend gives it."""
    data = value.encode() if isinstance(value, str) else value
    return np.array([data], dtype=object).reshape(shape)


def parse(tensors=None, json_text=None, **parameters) -> GenerationRequest:
    given_tensors = {"text_input": text("hi"), **(tensors or {})}
    if json_text is not None:
        given_tensors["sampling_parameters"] = text(json_text)
    return parse_request(given_tensors, parameters, "r1", 0, Settings(), VOCAB)


def error(*args, **parameters) -> str:
    with pytest.raises(RequestError) as caught:
        parse(*args, **parameters)
    message = str(caught.value)
    assert len(message) < 1200
    message.encode()  # Triton takes no lone surrogates
    return message


def test_defaults_are_vllm_backends():
    request = parse()
    assert request == GenerationRequest(
        request_id="r1", text="hi", sampling=SamplingParams(), output=OutputOptions(echo_prompt=True)
    )


def test_identity_and_deadline_are_passed_on():
    request = parse_request({"text_input": text("hi")}, {}, "abc", 1500, Settings(stream_interval=4), VOCAB)
    assert (request.request_id, request.timeout_us, request.output.stream_interval) == ("abc", 1500, 4)


# What the checkpoint says


def sampled(json_text: str | None = None, **asked) -> SamplingParams:
    defaults = checkpoint_defaults(checkpoint_that_asks_for(**asked))
    tensors = {"text_input": text("hi")} | ({"sampling_parameters": text(json_text)} if json_text else {})
    return parse_request(tensors, {}, "", 0, Settings(), VOCAB, defaults).sampling


def checkpoint_that_asks_for(**asked) -> Checkpoint:
    config = HashConfig(architecture="TandemHashModel", vocab_size=VOCAB, max_position=64)
    return Checkpoint(name="org/m", config=config, tokenizer=None, eos_token_ids=(), sampling=SamplingDefaults(**asked))


def test_the_checkpoint_says_what_the_request_does_not():
    assert sampled(temperature=0.6, top_k=20, top_p=0.95) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert sampled('{"temperature": 0, "top_k": -1}', temperature=0.6, top_k=20) == SamplingParams(temperature=0.0)
    assert sampled(top_k=VOCAB + 1, temperature=1e-9) == SamplingParams(temperature=0.0)


def test_the_checkpoints_length_is_not_the_clients():
    assert sampled('{"min_tokens": 7}', max_tokens=5).max_tokens is None


def test_all_that_a_checkpoint_asks_for_is_a_field():
    asked = {"min_p": 0.5, "repetition_penalty": 1.1, "top_p": 0.5, "top_k": 3.0, "temperature": 2.0}
    assert sampled(**asked) == SamplingParams(**asked | {"top_k": 3})


def test_what_the_checkpoint_asks_for_and_makes_no_sense_is_named():
    with pytest.raises(ValueError, match=r"org/m asks for sampling that cannot be done: 'top_p' is 1\.5; allowed is"):
        checkpoint_defaults(checkpoint_that_asks_for(top_p=1.5))


# The prompt


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_prompt_of_any_shape_with_one_element(shape):
    assert parse({"text_input": text("héllo 👍", shape)}).text == "héllo 👍"


def test_prompt_may_hold_a_nul():
    assert parse({"text_input": text(b"a\x00b")}).text == "a\x00b"


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (text(""), "not empty"),
        (text(b"caf\xe9"), "not valid UTF-8 (byte 3)"),
        (np.array([b"a", b"b"], dtype=object), "2 elements"),
        (np.array([], dtype=object), "0 elements"),
        (np.array([7]), "is 7; allowed is one string"),
    ],
)
def test_bad_prompt(tensor, words):
    message = error({"text_input": tensor})
    assert message.startswith("'text_input'")
    assert words in message


def test_missing_prompt():
    with pytest.raises(RequestError, match="'text_input' is missing"):
        parse_request({}, {}, "", 0, Settings(), VOCAB)


# Where a value comes from


def test_precedence_is_tensor_then_json_then_parameter():
    tensors = {"max_tokens": np.array([1], np.int32)}
    json_text = '{"max_tokens": 2, "top_k": 2}'
    sampling = parse(tensors, json_text, max_tokens=3, top_k=3, min_tokens=1).sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.min_tokens) == (1, 2, 1)


def test_sampling_parameters_may_be_a_request_parameter():
    assert parse(sampling_parameters='{"max_tokens": "5"}', max_tokens=3).sampling.max_tokens == 5
    assert parse({}, '{"top_k": 1}', sampling_parameters='{"top_k": 2, "max_tokens": 9}').sampling == SamplingParams(
        top_k=1
    )


def test_null_counts_as_not_given():
    sampling = parse({}, '{"max_tokens": null, "stop": null, "logprobs": null, "n": null}', max_tokens=3).sampling
    assert sampling == SamplingParams(max_tokens=3)


@pytest.mark.parametrize("blank", ["", "  ", "{}"])
def test_blank_sampling_parameters(blank):
    assert parse({}, blank).sampling == SamplingParams()


@pytest.mark.parametrize(
    "bad",
    ["{", "[]", "3", "null", '"x"', "not json", "[" * 100_000, '{"seed": ' + "9" * 5000 + "}", '{"a":' * 90_000],
)
def test_bad_sampling_parameters(bad):
    assert "'sampling_parameters'" in error({}, bad)
    assert "JSON object" in error({}, bad)


def test_duplicate_keys_take_the_last():
    assert parse({}, '{"top_k": 1, "top_k": 2}').sampling.top_k == 2


@pytest.mark.parametrize(
    "key",
    [
        "triton_enable_empty_final_response",
        "triton_anything",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "headers",
        "id",
        "binary_data_output",
        "x-forwarded-for",
    ],
)
def test_keys_of_the_server_are_ignored(key):
    assert parse(**{key: "1"}) == parse()


def test_the_timeout_of_a_generate_request_is_a_parameter():
    assert parse(timeout=1500).timeout_us == 1500
    assert parse(timeout="1500").timeout_us == 1500
    assert parse().timeout_us == 0
    assert parse_request({"text_input": text("hi")}, {"timeout": 9}, "", 7, Settings(), VOCAB).timeout_us == 7
    assert error(timeout=-1) == "'timeout' is -1; allowed is a whole number from 0 to 9223372036854775807"


def test_bounds_are_written_exactly():
    assert error(seed=1 << 64).endswith("from -9223372036854775808 to 18446744073709551615")
    assert error(temperature=-0.5).endswith("a number from 0 to 1000000")


def test_unknown_keys_are_named_with_a_suggestion():
    for message in (error(max_token=5), error({}, '{"max_token": 5}'), error({"max_token": np.array([5])})):
        assert "'max_token' (did you mean 'max_tokens'?)" in message
        assert all(field.name in message for field in SUPPORTED)
    assert "did you mean" not in error(zzzzzzzz=1)
    assert "'\\ud800'" in error({}, '{"\\ud800": 1}')
    error({}, json.dumps({"k" * 100_000: 1}))


def test_server_keys_are_no_sampling_parameters():
    assert "unknown field 'zz-top'" in error({}, '{"zz-top": 1}')


# Kinds of values


@pytest.mark.parametrize("raw", [128, 128.0, "128", " 128 ", "128.0", "1.28e2", "+128"])
def test_whole_numbers(raw):
    assert parse(max_tokens=raw).sampling.max_tokens == 128


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, np.uint8, np.uint64, np.float32, np.float64])
def test_whole_numbers_from_tensors(dtype):
    assert parse({"max_tokens": np.array([[12]], dtype)}).sampling.max_tokens == 12
    assert type(parse({"max_tokens": np.array([[12]], dtype)}).sampling.max_tokens) is int


@pytest.mark.parametrize("raw", [0.7, "0.7", " .7", "7e-1"])
def test_numbers(raw):
    assert parse(temperature=raw).sampling.temperature == 0.7


@pytest.mark.parametrize("raw", [True, 1, "true", "TRUE", "1", " True "])
def test_true(raw):
    assert parse(ignore_eos=raw).sampling.ignore_eos is True
    assert parse({}, json.dumps({"ignore_eos": raw})).sampling.ignore_eos is True


@pytest.mark.parametrize("raw", [False, 0, "false", "False", "0"])
def test_false(raw):
    assert parse(ignore_eos=raw).sampling.ignore_eos is False


def test_boolean_tensors():
    assert parse({"ignore_eos": np.array([True])}).sampling.ignore_eos is True
    assert parse({"stream": text("true")}).output.stream is True


@pytest.mark.parametrize(
    ("parameters", "stop"),
    [
        ({"stop": "END"}, ("END",)),
        ({"stop": '["a", "b"]'}, ("a", "b")),
        ({"stop": "[]"}, ()),
        ({"stop": "[INST]"}, ("[INST]",)),
        ({"stop": "[1, 2]"}, ("[1, 2]",)),
        ({"stop": '"quoted"'}, ('"quoted"',)),
        ({"sampling_parameters": '{"stop": ["a", "\\n\\n"]}'}, ("a", "\n\n")),
        ({"sampling_parameters": '{"stop": "a"}'}, ("a",)),
        ({"sampling_parameters": '{"stop": []}'}, ()),
    ],
)
def test_stop(parameters, stop):
    assert parse(**parameters).sampling.stop == stop


def test_stop_tensors():
    assert parse({"stop": np.array([b"a", b"[b"], dtype=object)}).sampling.stop == ("a", "[b")
    assert parse({"stop": np.array([], dtype=object)}).sampling.stop == ()
    assert parse({"stop": text('["a", "b"]', (1, 1))}).sampling.stop == ("a", "b")


@pytest.mark.parametrize("raw", ["[1, 2]", '[1.0, "2"]'])
def test_stop_token_ids(raw):
    assert parse(stop_token_ids=raw).sampling.stop_token_ids == (1, 2)
    assert parse({"stop_token_ids": np.array([1, 2], np.int32)}).sampling.stop_token_ids == (1, 2)
    assert parse(stop_token_ids=7).sampling.stop_token_ids == (7,)
    assert parse(stop_token_ids="7").sampling.stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("raw", "seed"),
    [
        (0, 0),
        (2**63 - 1, 2**63 - 1),
        (str(2**64 - 1), 2**64 - 1),
        (-2, 2**64 - 2),
        (-(2**63), 2**63),
        (-1, None),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_seed(raw, seed):
    assert parse(seed=raw).sampling.seed == seed


def test_seed_tensor_of_64_bits():
    assert parse({"seed": np.array([2**64 - 1], np.uint64)}).sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("raw", "top_k"), [(-1, 0), (0, 0), (1, 1), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (2**31 - 1, 0)]
)
def test_top_k_of_everything_is_zero(raw, top_k):
    assert parse(top_k=raw).sampling.top_k == top_k


def test_a_tiny_temperature_is_greedy():
    assert parse(temperature=1e-300).sampling.temperature == 0
    assert parse(temperature=1e-5).sampling.temperature == 1e-5


# What is refused

NO_NUMBER = ["", "x", "nan", "inf", "-inf", float("nan"), float("inf"), True, False, "1e999", "0x10", "9" * 5000]


@pytest.mark.parametrize("raw", [*NO_NUMBER, 0, -1, 1.5, "1.5", 2**31, "12x"])
def test_bad_max_tokens(raw):
    message = error(max_tokens=raw)
    assert message.startswith("'max_tokens' is ")
    assert message.endswith("allowed is a whole number from 1 to 2147483647")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("min_tokens", [-1, 0.5]),
        ("temperature", [*NO_NUMBER, -0.1, "-1", 1e7]),
        ("top_p", [*NO_NUMBER, 0, 0.0, -0.1, 1.0001, "2"]),
        ("top_k", [*NO_NUMBER, -2, 1.5]),
        ("seed", [*NO_NUMBER, 2.5, str(2**64), str(-(2**63) - 1)]),
        ("ignore_eos", ["yes", "", 2, 0.5, 1.0, "2"]),
        ("stream", ["on", -1]),
        ("stop", ['[""', "x" * 1025, 5, 1.5, True, json.dumps(["x"] * 65)]),
        ("stop_token_ids", [-1, VOCAB, "[1, -1]", "[1.5]", "x", '["x"]', "[[1]]", "[true]", "[" * 9000, str([1] * 65)]),
        ("stream_interval", [0, -1, "x", True]),
        ("exclude_input_in_output", ["maybe", 3]),
        ("n", [65, 0, "0", -1, 1.5]),
        ("logprobs", [-1, 21, "x"]),
        ("presence_penalty", [2.5, "x"]),
        ("skip_special_tokens", ["no"]),
    ],
)
def test_bad_values_name_field_value_and_what_is_allowed(name, values):
    for value in values:
        message = error(**{name: value})
        assert message.startswith(f"'{name}' is ")
        assert "; allowed is " in message or "; only " in message


@pytest.mark.parametrize("raw", [[1], {"a": 1}, [[1]], {}])
def test_json_containers_where_a_number_is_wanted(raw):
    for name in ("max_tokens", "temperature", "seed", "ignore_eos", "n"):
        assert error({}, json.dumps({name: raw})).startswith(f"'{name}' is ")


def test_a_huge_number_in_json():
    assert "'temperature'" in error({}, '{"temperature": ' + "9" * 4000 + "}")
    assert "'max_tokens'" in error({}, '{"max_tokens": ' + "9" * 4000 + "}")


def test_a_lone_surrogate_is_no_stop_string():
    assert "'stop' is '\\ud800'" in error({}, '{"stop": "\\ud800"}')


def test_long_values_are_shortened():
    assert len(error(max_tokens="x" * 10_000)) < 200
    assert len(error({}, json.dumps({"stop": [["x" * 1000] * 1000]}))) < 250


def test_a_scalar_tensor_of_several_elements():
    assert error({"max_tokens": np.array([1, 2])}) == "'max_tokens' has 2 elements; allowed is one"


def test_min_tokens_above_max_tokens():
    assert error(min_tokens=5, max_tokens=4) == "'min_tokens' is 5; allowed is at most max_tokens, which is 4"
    assert parse(min_tokens=4, max_tokens=4).sampling.min_tokens == 4
    assert parse(min_tokens=4).sampling.min_tokens == 4


# Outputs


@pytest.mark.parametrize(
    ("parameters", "echo_prompt"),
    [
        ({}, True),
        ({"exclude_input_in_output": False}, True),
        ({"exclude_input_in_output": True}, False),
        ({"stream": False}, True),
        ({"stream": True}, False),
        ({"stream": True, "exclude_input_in_output": True}, False),
    ],
)
def test_prompt_in_the_output(parameters, echo_prompt):
    tensors = {name: np.array([value]) for name, value in parameters.items()}
    assert parse(**parameters).output.echo_prompt is echo_prompt
    assert parse(tensors).output.echo_prompt is echo_prompt


def test_a_stream_cannot_echo_the_prompt():
    message = error(stream=True, exclude_input_in_output=False)
    assert message == "'exclude_input_in_output' is False; allowed is true when streaming"


def test_output_options():
    output = parse(
        stream=True,
        return_finish_reason=True,
        return_num_input_tokens="true",
        return_num_output_tokens=1,
        stream_interval="8",
    ).output
    assert output == OutputOptions(
        stream=True, finish_reason=True, num_input_tokens=True, num_output_tokens=True, stream_interval=8
    )


# Clients


def test_genai_perf():
    """Its vLLM mode: numbers as JSON strings."""
    tensors = {"exclude_input_in_output": np.array([True]), "stream": np.array([True])}
    request = parse(tensors, '{"max_tokens":"128","min_tokens":"128"}', triton_enable_empty_final_response=True)
    assert request.sampling == SamplingParams(max_tokens=128, min_tokens=128)


def test_openai_frontend():
    """Triton's OpenAI frontend sends every sampling field that is not null, at its default if the client set none."""
    body = {
        "frequency_penalty": 0.0,
        "logprobs": False,
        "max_tokens": 16,
        "n": 1,
        "presence_penalty": 0.0,
        "temperature": 0.7,
        "top_p": 1.0,
    }
    tensors = {name: np.array([False]) for name in ("return_logprobs",)}
    assert parse(tensors, json.dumps(body)).sampling == SamplingParams(max_tokens=16, temperature=0.7)


# The table


def test_every_supported_field_reaches_its_noun():
    for field in SUPPORTED:
        if field.noun:
            specs = {spec.name: spec for spec in fields(field.noun)}
            assert field.default == specs[field.attribute].default
        assert field.help


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(list(FIELDS)), json_values, max_size=4))
@hypothesis_settings(max_examples=300, deadline=None)
def test_any_json_is_a_request_or_an_error_for_the_client(values):
    try:
        request = parse({}, json.dumps(values))
    except RequestError as caught:
        str(caught).encode()
    else:
        assert isinstance(request, GenerationRequest)


def test_the_router_loads_no_torch():
    code = (
        "import sys, backend_lib.router.contract, backend_lib.router.text;"
        "sys.exit(bool({'torch', 'triton'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_page_for_clients_of_vllm_backend_lists_what_is_refused():
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    assert [name for name, field in FIELDS.items() if not field.is_supported and f"`{name}`" not in page] == []
