"""The contract of tensorrtllm_backend: its tensors, with a batch dimension, through a real server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.support.clients import TIMEOUT, GrpcStream, HttpClient, Response, grpc_stream
from tests.support.documents import run
from tests.support.hashing import ENDLESS, PROMPT, PROMPT_IDS, answer, continuation
from tests.support.server import RunningServer, running_server

DTYPES = {int: np.int32, float: np.float32, bool: np.bool_}


@pytest.fixture(scope="module")
def trtllm(hash_checkpoint) -> Iterator[RunningServer]:
    with running_server(
        model=hash_checkpoint, settings={"contract": "trtllm"}, extra_flags=["--exit-timeout-secs=3"]
    ) as server:
        yield server


@pytest.fixture
def grpc(trtllm) -> Iterator[GrpcStream]:
    with grpc_stream(trtllm.grpc_url) as stream:
        yield stream


@pytest.fixture
def http(trtllm) -> HttpClient:
    return HttpClient(trtllm.http_url)


def batched(**values: Any) -> dict[str, np.ndarray]:
    """Tensors of shape [1, 1], or [1, k] for a list, in the types that tensorrtllm_backend declares."""
    return {name: _tensor(value if isinstance(value, list) else [value]) for name, value in values.items()}


def _tensor(values: list[Any]) -> np.ndarray:
    if isinstance(values[0], str):
        return np.array([[value.encode() for value in values]], dtype=object)
    return np.array([values], DTYPES.get(type(values[0])))


def ask(grpc: GrpcStream, request_id: str = "", **values: Any) -> list[Response]:
    given = {"temperature": 0.0, "max_tokens": 8, "exclude_input_in_output": True, "text_input": PROMPT}
    return grpc.ask(None, request_id=request_id, **batched(**{**given, **values}), parameters={"ignore_eos": True})


def test_the_model_has_a_batch_dimension(trtllm):
    with grpcclient.InferenceServerClient(trtllm.grpc_url) as client:
        config = client.get_model_config("llm", client_timeout=TIMEOUT).config
        metadata = client.get_model_metadata("llm", client_timeout=TIMEOUT)
    shapes = {each.name: (each.datatype, list(each.shape)) for each in metadata.inputs}
    assert config.max_batch_size == 1
    assert shapes["text_input"] == ("BYTES", [-1, 1])
    assert shapes["max_tokens"] == ("INT32", [-1, 1])
    assert shapes["stop"] == ("BOOL", [-1, 1])
    assert shapes["stop_words"] == ("BYTES", [-1, -1])
    assert shapes["seed"] == ("UINT64", [-1, 1])
    assert all(each.optional for each in config.input)


def test_a_request_as_genai_perf_sends_it(grpc):
    """Its tensorrtllm mode: text_input and max_tokens of shape [1, 1], streamed."""
    responses = ask(grpc, stream=True)
    assert "".join(response.outputs["text_output"][0].decode() for response in responses) == answer(8)
    assert {response.outputs["text_output"].shape for response in responses} == {(1,)}
    assert responses[-1].final and grpc.is_quiet(0.1)


def test_perf_analyzer_as_genai_perf_starts_it(trtllm, tmp_path):
    """The tool itself, with the flags of genai-perf's tensorrtllm mode."""
    line = {"text_input": [PROMPT], "max_tokens": [16], "min_length": [16], "stream": [True]}
    (tmp_path / "input.json").write_text(json.dumps({"data": [line | {"exclude_input_in_output": [True]}]}))
    run(
        f"{sys.executable} -m benchmarks.perf_analyzer -- -m llm -u {trtllm.grpc_url} -i grpc --streaming --async "
        f"--shape max_tokens:1 --shape text_input:1 --input-data {tmp_path}/input.json --concurrency-range 2 "
        f"--request-count 4 --profile-export-file {tmp_path}/profile.json"
    )
    (experiment,) = json.loads((tmp_path / "profile.json").read_text())["experiments"]
    lengths = [
        len("".join(each["text_output"] for each in asked["response_outputs"])) for asked in experiment["requests"]
    ]
    assert len(lengths) == 4 and all(length >= 14 for length in lengths), "special tokens have no text"


def test_min_length_is_min_tokens(grpc):
    """genai-perf's way to a length that is always the same; without it EOS would end the text."""
    request = batched(text_input=PROMPT, max_tokens=12, min_length=12, temperature=0.0, exclude_input_in_output=True)
    (response,) = grpc.ask(None, **request | batched(return_num_output_tokens=True))
    assert response.outputs["num_output_tokens"].tolist() == [[12]]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"request_output_len": 5}, answer(5)),
        ({"max_tokens": 30, "runtime_top_k": 1, "temperature": 5.0}, answer(30)),
        ({"max_tokens": 30, "runtime_top_p": 0.001, "temperature": 0.5}, answer(30)),
        ({"max_tokens": 30, "top_k": 1, "temperature": 5.0}, answer(30)),
        ({"max_tokens": 8, "stop_words": ["nothing", answer(4)[3]]}, answer(3)),
        ({"max_tokens": 8, "end_id": continuation(PROMPT_IDS, 4)[3]}, answer(3)),
        ({"max_tokens": 4, "beam_width": 1, "len_penalty": 1.0, "early_stopping": False, "pad_id": 0}, answer(4)),
        ({"max_tokens": 3, "streaming": True}, answer(3)),
        ({"max_tokens": 3, "runtime_top_p": 0.0, "end_id": -1, "len_penalty": 0.0}, answer(3)),
        ({"max_tokens": 3, "return_context_logits": False, "return_generation_logits": False}, answer(3)),
        ({"max_tokens": 3, "return_perf_metrics": False, "return_kv_cache_reuse_stats": False}, answer(3)),
    ],
)
def test_each_name_is_obeyed(grpc, given, text):
    request = {"text_input": PROMPT, "exclude_input_in_output": True, "temperature": 0.0} | given
    responses = grpc.ask(None, **batched(**request), parameters={"ignore_eos": True})
    assert "".join(response.outputs["text_output"][0].decode() for response in responses) == text


def test_sequences_and_their_ids(grpc):
    (response,) = ask(grpc, num_return_sequences=2, return_output_ids=True, return_num_input_tokens=True)
    assert response.outputs["text_output"].tolist() == [answer(8).encode()] * 2
    assert response.outputs["output_ids"].tolist() == [continuation(PROMPT_IDS, 8) * 2]
    assert response.outputs["num_output_tokens"].tolist() == [[8, 8]]
    assert response.outputs["num_input_tokens"].tolist() == [[len(PROMPT_IDS)]]


def test_streamed_sequences_come_one_by_one(grpc):
    """As tensorrtllm_backend's client reads them: one element, and whose it is."""
    responses = ask(grpc, stream=True, num_return_sequences=3, return_num_output_tokens=True, return_log_probs=True)
    texts, counts, sums = [""] * 3, [0] * 3, [0.0] * 3
    for response in responses:
        index = response.outputs["sequence_index"][0][0]
        texts[index] += response.outputs["text_output"][0].decode()
        counts[index] += response.outputs["num_output_tokens"][0][0]
        sums[index] += response.outputs["output_log_probs"][0][0].sum()
        assert sums[index] == pytest.approx(response.outputs["cum_log_probs"][0][0], rel=1e-5)
        shapes = {name: array.shape for name, array in response.outputs.items()}
        assert (shapes["text_output"], shapes["sequence_index"], shapes["cum_log_probs"]) == ((1,), (1, 1), (1, 1))
    assert (texts, counts) == ([answer(8)] * 3, [8] * 3)
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]


def test_log_probabilities_under_their_names(grpc):
    (response,) = ask(grpc, num_return_sequences=2, return_log_probs=True)
    chosen, sums = response.outputs["output_log_probs"], response.outputs["cum_log_probs"]
    assert (chosen.shape, sums.shape, chosen.dtype) == ((1, 2, 8), (1, 2), np.float32)
    assert chosen.sum(axis=2) == pytest.approx(sums, rel=1e-5)
    rows = json.loads(response.outputs["logprobs"][0][1])
    ids = continuation(PROMPT_IDS, 8)
    expected = [row[str(token)]["logprob"] for row, token in zip(rows, ids, strict=True)]
    assert chosen[0][1].tolist() == pytest.approx(expected)


def test_a_prompt_of_ids_with_its_length(grpc):
    """As for the model `tensorrt_llm` alone."""
    request = {"input_ids": [*PROMPT_IDS, 0, 0], "input_lengths": 3, "request_output_len": 6, "temperature": 0.0}
    (response,) = grpc.ask(None, **batched(**request, exclude_input_in_output=True), parameters={"ignore_eos": True})
    assert response.outputs["text_output"].tolist() == [answer(6).encode()]


def test_stop_ends_a_request(grpc, trtllm):
    with grpc_stream(trtllm.grpc_url) as running:
        request = batched(text_input=PROMPT, stream=True)
        running.send(None, request_id="7", parameters=ENDLESS, **request)
        assert running.next().outputs["text_output"].size
        (response,) = grpc.ask(None, request_id="7", **batched(stop=True))
        assert response.final and not response.error
        assert "the request was cancelled" in running.rest()[-1].error
    assert "the request id is missing" in grpc.error(None, **batched(stop=True))
    assert ask(grpc, stop=False)[0].outputs["text_output"][0].decode() == answer(8)


def test_the_generate_endpoint(http):
    body = {"text_input": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "bad_words": [], "stop": False}
    assert http.generate(None, **body)["text_output"] == PROMPT + answer(8)
    stops = body | {"stop_words": [answer(4)[3]], "stream": True}
    assert "".join(piece["text_output"] for piece in http.stream(None, **stops)) == answer(3)
    in_json = {"text_input": PROMPT, "sampling_parameters": json.dumps({"max_tokens": "3", "temperature": 0})}
    assert http.generate(None, **in_json)["text_output"] == PROMPT + answer(3)


def test_the_request_that_tensorrtllm_backend_documents(trtllm):
    body = '{"text_input":"What is machine learning?","max_tokens":20,"bad_words":"","stop_words":""}'
    body = body.replace("What is machine learning?", PROMPT)  # the test model knows no ASCII
    said = json.loads(run(f"curl -s -X POST {trtllm.http_url}/v2/models/llm/generate -d '{body}'"))
    assert said["text_output"].startswith(PROMPT) and len(said["text_output"]) > len(PROMPT)


@pytest.mark.parametrize("none", ["", [""], [[""]], ["", ""]])
def test_empty_words_are_none(http, none):
    body = {"text_input": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    assert http.generate(None, **body, bad_words=none, stop_words=none)["text_output"] == PROMPT + answer(8)


def test_what_is_wrong_is_said_in_words(grpc, http):
    assert "'max_tokens' is 0; allowed is a whole number from 1" in grpc.error(
        None, **batched(text_input=PROMPT, max_tokens=0)
    )
    assert "'beam_width' is 2; only 1 is supported" in grpc.error(None, **batched(text_input=PROMPT, beam_width=2))
    wrong = batched(text_input=PROMPT, request_output_len=0)
    assert "'request_output_len' is 0; allowed is a whole number from 1" in grpc.error(None, **wrong)
    wrong = batched(text_input=PROMPT, return_context_logits=True)
    assert "'return_context_logits' is True; only false is supported" in grpc.error(None, **wrong)
    two = {"text_input": np.array([[b"a"], [b"b"]], dtype=object)}
    assert "batch-size" in grpc.error(None, **two)
