"""gRPC streams: names, types and shapes of what comes out, the final flag, and Triton's asyncio client."""

from __future__ import annotations

import asyncio

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.grpc.aio as grpcaio

from backend_lib.router.fields import ALIASES, FIELDS
from tests.support.clients import TIMEOUT, Response, make_input, read_result
from tests.support.hashing import GREEDY, PROMPT, answer

USAGE = {"return_finish_reason": True, "return_num_input_tokens": True, "return_num_output_tokens": True}
LENGTH_5 = {"parameters": {"max_tokens": 5, **GREEDY}}


def joined(responses: list[Response]) -> str:
    return "".join(response.text for response in responses)


def test_metadata_names_every_input_and_output(hash_server):
    with grpcclient.InferenceServerClient(hash_server.grpc_url) as client:
        metadata = client.get_model_metadata("llm", client_timeout=TIMEOUT)
        config = client.get_model_config("llm", client_timeout=TIMEOUT).config
    assert [(each.name, each.datatype, list(each.shape)) for each in metadata.outputs] == [
        ("text_output", "BYTES", [-1]),
        ("finish_reason", "BYTES", [-1]),
        ("num_input_tokens", "UINT32", [1]),
        ("num_output_tokens", "UINT32", [-1]),
        ("num_cached_tokens", "UINT32", [1]),
        ("sequence_index", "UINT32", [-1]),
        ("logprobs", "BYTES", [-1]),
        ("cumulative_logprob", "FP32", [-1]),
        ("prompt_logprobs", "BYTES", [1]),
        ("output_ids", "INT32", [-1]),
        ("reasoning_content", "BYTES", [-1]),
        ("tool_calls", "BYTES", [-1]),
    ]
    inputs = {each.name: (each.datatype, list(each.shape)) for each in metadata.inputs}
    assert inputs["text_input"] == ("BYTES", [1])
    assert inputs["stop"] == ("BYTES", [-1])
    assert set(inputs) - {"text_input", "sampling_parameters"} <= {*FIELDS, *ALIASES}
    assert all(each.optional for each in config.input), "a prompt has three spellings"
    assert config.model_transaction_policy.decoupled


def test_types_and_shapes_of_the_outputs(grpc):
    responses = grpc.ask(PROMPT, stream=True, **USAGE, **LENGTH_5)
    for response in responses:
        shapes = {name: (array.dtype, array.shape) for name, array in response.outputs.items()}
        assert shapes == {
            "text_output": (np.object_, (1,)),
            "finish_reason": (np.object_, (1,)),
            "num_input_tokens": (np.uint32, (1,)),
            "num_output_tokens": (np.uint32, (1,)),
        }


def test_every_response_carries_the_id_and_only_the_last_is_final(grpc):
    responses = grpc.ask(PROMPT, stream=True, request_id="r 1", **USAGE, **LENGTH_5)
    assert joined(responses) == answer(5)
    assert {response.id for response in responses} == {"r 1"}
    assert [response.final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert [response.finish_reason for response in responses] == ["None"] * (len(responses) - 1) + ["length"]
    assert sum(int(response.outputs["num_output_tokens"][0]) for response in responses) == 5


def test_the_final_flag_rides_on_data_even_for_clients_that_take_an_empty_one(grpc):
    responses = grpc.ask(PROMPT, stream=True, empty_final=True, **LENGTH_5)
    assert all("text_output" in response.outputs for response in responses)
    assert joined(responses) == answer(5)
    assert grpc.is_quiet()


def test_without_streaming_there_is_one_response_that_is_final(grpc):
    for stream in ({}, {"stream": False}):
        (response,) = grpc.ask(PROMPT, empty_final=True, **stream, **LENGTH_5)
        assert response.final
        assert response.text == PROMPT + answer(5)
    assert grpc.is_quiet()


def test_only_requested_outputs_come(grpc):
    (response,) = grpc.ask(PROMPT, outputs=["num_output_tokens"], **USAGE, **LENGTH_5)
    assert set(response.outputs) == {"num_output_tokens"}


def test_requests_of_one_stream_run_side_by_side(grpc):
    for number in range(8):
        parameters = {"max_tokens": 20 + number, **GREEDY}
        grpc.send(PROMPT, stream=True, request_id=str(number), parameters=parameters)
    texts = dict.fromkeys(map(str, range(8)), "")
    while sum(map(len, texts.values())) < sum(range(20, 28)):
        response = grpc.next()
        assert not response.error
        texts[response.id] += response.text
    assert texts == {str(number): answer(20 + number) for number in range(8)}


def test_an_error_leaves_the_stream_open(grpc):
    assert "max_tokens" in grpc.error(PROMPT, parameters={"max_tokens": 0})
    assert joined(grpc.ask(PROMPT, stream=True, **LENGTH_5)) == answer(5)


def test_asyncio_client(hash_server):
    async def requests():
        for number in range(4):
            yield {
                "model_name": "llm",
                "inputs": [make_input("text_input", PROMPT), make_input("stream", True)],
                "request_id": str(number),
                "parameters": {"max_tokens": 10, **GREEDY},
            }

    async def ask() -> dict[str, str]:
        texts = dict.fromkeys(map(str, range(4)), "")
        async with grpcaio.InferenceServerClient(hash_server.grpc_url) as client:
            async for result, error in client.stream_infer(requests(), stream_timeout=TIMEOUT):
                assert error is None
                response = read_result(result)
                texts[response.id] += response.text
        return texts

    assert asyncio.run(asyncio.wait_for(ask(), TIMEOUT)) == {str(number): answer(10) for number in range(4)}


def test_text_of_any_length_comes_through(grpc):
    """Past the 1 MiB that Triton's shared memory starts with."""
    ids = [3 + number % 900 for number in range(40_000)]
    text = "".join(chr(0x4E00 + i) for i in ids)
    (response,) = grpc.ask(text, return_num_input_tokens=True, parameters={"max_tokens": 2, **GREEDY})
    assert int(response.outputs["num_input_tokens"][0]) == 40_000
    assert response.text.startswith(text)


def test_several_sequences_have_an_element_each(grpc):
    """Greedy sequences are all alike; each response has one element per sequence and says whose news it brings."""
    responses = grpc.ask(PROMPT, stream=True, **USAGE, parameters={"max_tokens": 5, "n": 3, **GREEDY})
    texts, finishes, tokens = (
        [response.outputs[name].tolist() for response in responses]
        for name in ("text_output", "finish_reason", "num_output_tokens")
    )
    assert all(len(each) == 3 for each in (*texts, *finishes, *tokens))
    for sequence in range(3):
        assert b"".join(each[sequence] for each in texts).decode() == answer(5)
        assert sum(each[sequence] for each in tokens) == 5
    assert finishes[-1] == [b"length"] * 3
    for response, text in zip(responses, texts, strict=True):
        (news,) = response.outputs["sequence_index"].tolist()
        assert all(text[other] == b"" for other in range(3) if other != news)


def test_without_streaming_several_sequences_come_in_one_response(grpc):
    (response,) = grpc.ask(
        PROMPT,
        return_num_cached_tokens=True,
        exclude_input_in_output=True,
        parameters={"max_tokens": 5, "n": 3, **GREEDY},
    )
    assert [text.decode() for text in response.outputs["text_output"].tolist()] == [answer(5)] * 3
    assert response.outputs["sequence_index"].tolist() == [0, 1, 2]


def test_cached_tokens_are_told(grpc):
    prompt = PROMPT * 3 + PROMPT[:1]
    first, second, private = (
        grpc.ask(prompt, return_num_cached_tokens=True, parameters={"max_tokens": 2, **how, **GREEDY})[-1]
        for how in ({}, {}, {"disable_prompt_cache": True})
    )
    cached = [response.outputs["num_cached_tokens"].tolist() for response in (first, second, private)]
    assert cached[0][0] < len(prompt) - 1
    assert cached[1:] == [[len(prompt) - 1], [0]]
