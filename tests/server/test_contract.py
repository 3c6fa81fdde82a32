"""Where a request's fields may stand, in every spelling that clients of vllm_backend use."""

from __future__ import annotations

import json

import numpy as np
import pytest

from backend_lib.router.fields import FIELDS
from tests.support.clients import GrpcStream, Response
from tests.support.hashing import GREEDY, PROMPT, PROMPT_IDS, answer, continuation, prompt_that_ends, text_of

# For each sampling field a request that shows that it is obeyed: other fields, and the text that must come.
THIRD = continuation(PROMPT_IDS, 3)[2]
OBEYED = {
    "max_tokens": (3, {"ignore_eos": True, "temperature": 0}, answer(3)),
    "temperature": (0, {"ignore_eos": True, "max_tokens": 30}, answer(30)),
    "top_k": (1, {"ignore_eos": True, "max_tokens": 30, "temperature": 5}, answer(30)),
    "top_p": (0.001, {"ignore_eos": True, "max_tokens": 30, "temperature": 0.5}, answer(30)),
    "stop": (answer(3)[2], {"max_tokens": 30, **GREEDY}, answer(2)),
    "stop_token_ids": (THIRD, {"max_tokens": 30, **GREEDY}, answer(2)),
}


def as_text(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", OBEYED)
@pytest.mark.parametrize("spell", [lambda value: value, as_text], ids=["typed", "text"])
def test_a_field_as_plain_parameter_nested_parameter_and_json(http, name, spell):
    value, others, text = OBEYED[name]
    body = {"exclude_input_in_output": True} | others
    spelled = spell(value)
    nested = http.generate(PROMPT, **body, parameters={name: spelled})
    plain = http.generate(PROMPT, **body, **{name: spelled})
    in_json = http.generate(PROMPT, **body, sampling_parameters=json.dumps({name: spelled}))
    assert [nested["text_output"], plain["text_output"], in_json["text_output"]] == [text] * 3


@pytest.mark.parametrize("name", OBEYED)
def test_a_field_as_grpc_parameter(grpc, name):
    value, others, text = OBEYED[name]
    # gRPC knows no floats among the parameters, so clients write them as text.
    values = {key: str(each) if isinstance(each, float) else each for key, each in {**others, name: value}.items()}
    (response,) = grpc.ask(PROMPT, exclude_input_in_output=True, parameters=values)
    assert response.text == text


def test_lists_in_json(http):
    stops = {"stop": ["nothing", answer(4)[3]], "stop_token_ids": [1, THIRD]}
    request = {"exclude_input_in_output": True, "max_tokens": 30, **GREEDY}
    for name, text in (("stop", answer(3)), ("stop_token_ids", answer(2))):
        in_json = json.dumps({name: stops[name]})
        assert http.generate(PROMPT, sampling_parameters=in_json, **request)["text_output"] == text
        # The generate endpoint refuses lists as parameters, so there they are JSON in a string.
        assert http.generate(PROMPT, **{name: json.dumps(stops[name])}, **request)["text_output"] == text


def test_ignore_eos_and_min_tokens(http):
    ids, count = prompt_that_ends()
    prompt, request = text_of(ids), {"exclude_input_in_output": True, "temperature": 0, "max_tokens": 20}
    assert http.generate(prompt, **request)["text_output"] == answer(count, ids)
    assert http.generate(prompt, ignore_eos=True, **request)["text_output"] == answer(20, ids)
    assert len(http.generate(prompt, min_tokens=20, **request)["text_output"]) == 20


def test_a_seed_repeats_a_draw_and_none_does_not(http):
    request = {"temperature": 100, "max_tokens": 12, "ignore_eos": True}
    first, again = (http.generate(PROMPT, seed=7, **request)["text_output"] for _ in range(2))
    assert first == again
    assert len({http.generate(PROMPT, **request)["text_output"] for _ in range(3)} | {first}) == 4


def test_precedence_is_tensor_then_json_then_parameter(http, grpc):
    in_json = {"sampling_parameters": '{"max_tokens": 2}'}
    request = {"exclude_input_in_output": True, "max_tokens": 3, **GREEDY}
    assert http.generate(PROMPT, **request, **in_json)["text_output"] == answer(2)
    json_says = json.dumps({"return_finish_reason": False, "max_tokens": 2, **GREEDY})
    (response,) = grpc.ask(PROMPT, return_finish_reason=True, sampling_parameters=json_says)
    assert response.finish_reason == "length"


def test_exclude_input_in_output(http, grpc):
    request = {"max_tokens": 3, **GREEDY}
    assert http.generate(PROMPT, **request)["text_output"] == PROMPT + answer(3)
    assert http.generate(PROMPT, exclude_input_in_output=False, **request)["text_output"] == PROMPT + answer(3)
    assert http.generate(PROMPT, exclude_input_in_output=True, **request)["text_output"] == answer(3)
    assert "allowed is true when streaming" in grpc.error(PROMPT, stream=True, exclude_input_in_output=False)
    for exclude in ({}, {"exclude_input_in_output": True}):
        responses = grpc.ask(PROMPT, stream=True, **exclude, parameters=request)
        assert "".join(response.text for response in responses) == answer(3)


@pytest.mark.parametrize("name", ["return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"])
def test_what_to_return_may_stand_among_the_sampling_parameters(http, name):
    output = name.removeprefix("return_")
    assert output in http.generate(PROMPT, max_tokens=1, parameters={"sampling_parameters": json.dumps({name: True})})


def test_every_supported_field_has_a_value_that_passes(http):
    """So that the table, the server and this file agree on what exists."""
    values = {
        "max_tokens": 2, "min_tokens": 1, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 1, "ignore_eos": True,
        "stop": "x", "stop_token_ids": 9, "stream": False, "return_finish_reason": True,
        "return_num_input_tokens": True, "return_num_output_tokens": True, "stream_interval": 2,
        "exclude_input_in_output": True,
    }  # fmt: skip
    supported = {name for name, field in FIELDS.items() if field.is_supported}
    assert set(values) <= supported
    http.generate(PROMPT, **values)
    http.generate(PROMPT, sampling_parameters=json.dumps(values))


def genai_perf(grpc: GrpcStream, *, stream: bool, sampling: dict[str, str], **extra: object) -> list[Response]:
    """One request as `genai-perf --service-kind triton --backend vllm` has perf_analyzer send it."""
    return grpc.ask(
        PROMPT,
        empty_final=True,
        request_id="1",
        exclude_input_in_output=True,
        sampling_parameters=json.dumps(sampling),
        **({"stream": True} if stream else {}),
        **extra,
    )


@pytest.mark.parametrize("stream", [True, False])
def test_requests_of_genai_perf_for_vllm(grpc, stream):
    sampling = {"max_tokens": "16", "min_tokens": "16", "temperature": "0", "ignore_eos": "true"}
    responses = genai_perf(grpc, stream=stream, sampling=sampling)
    assert "".join(response.text for response in responses) == answer(16)
    assert responses[-1].final
    assert grpc.is_quiet(0.1)
    assert all(response.text for response in responses), "an empty piece would count as a first token"


def test_the_body_of_genai_perf_for_generate(http):
    """`--endpoint-type generate` wraps the prompt in a list."""
    body = {"text_input": [PROMPT], "stream": True, "max_tokens": 8, **GREEDY}
    pieces = list(http.stream(None, **body))
    assert "".join(piece["text_output"] for piece in pieces) == answer(8)


def test_requests_of_tritons_openai_frontend(grpc):
    """Its vLLM format: every key of the body at the value that leaves it off."""
    sampling = {
        "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "n": 1, "best_of": 1, "seed": None, "stop": [], "logprobs": None,
    }  # fmt: skip
    responses = grpc.ask(
        PROMPT,
        stream=True,
        exclude_input_in_output=True,
        return_num_input_tokens=True,
        return_num_output_tokens=True,
        sampling_parameters=json.dumps(sampling),
    )
    assert "".join(response.text for response in responses) == answer(8)
    assert sum(int(response.outputs["num_output_tokens"][0]) for response in responses) == 8


def test_the_client_of_vllm_backend(grpc):
    """samples/client.py: tensors of shape [1], sampling parameters as text."""
    (response,) = grpc.ask(
        PROMPT,
        request_id="0",
        stream=np.array([False]),
        sampling_parameters=np.array([b'{"temperature": "0", "top_p": "0.95", "max_tokens": "4"}'], dtype=object),
        exclude_input_in_output=np.array([False]),
    )
    assert response.text == PROMPT + answer(4)
