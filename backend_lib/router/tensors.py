"""The model's inputs and outputs as Triton knows them, under either contract, and the arrays of a response."""

from __future__ import annotations

from typing import Any

import numpy as np

from backend_lib.request import OutputOptions
from backend_lib.router.fields import ALIASES, FIELDS
from backend_lib.router.kinds import INTEGER, NUMBER, TOKEN_IDS, TRUTH
from backend_lib.router.reply import Reply

VLLM, TRTLLM = "vllm", "trtllm"
BATCH_SIZES = {VLLM: 0, TRTLLM: 1}  # with 1 every tensor has a batch dimension, which is 1
STOP = "stop"  # texts under one contract, an order to end a request under the other

_TYPES = {TRUTH: "TYPE_BOOL", INTEGER: "TYPE_INT32", NUMBER: "TYPE_FP32", TOKEN_IDS: "TYPE_INT32"}
_TYPES_BY_NAME = dict.fromkeys(("seed", "random_seed", "sampling_param_seed"), "TYPE_UINT64")

_COMMON = (
    *("stream", "sampling_parameters", "exclude_input_in_output", "cancel", "stop_words", "bad_words", "image"),
    *(name for name, field in FIELDS.items() if name.startswith("return_") and field.is_supported),
)
# Clients of tensorrtllm_backend send as tensors what those of vllm_backend put into `sampling_parameters`.
_OF_TRTLLM = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "length_penalty", "early_stopping", "beam_width", "pad_id", "input_lengths"),
    *("guided_decoding_guide_type", "guided_decoding_guide"),
    *(name for name, field in FIELDS.items() if name.startswith("return_") and not field.is_supported),
    *(alias for alias in ALIASES if alias not in ("stop_words", "bad")),
)

_OUTPUTS: tuple[dict[str, Any], ...] = (
    {"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "num_input_tokens", "data_type": "TYPE_UINT32", "dims": [1]},
    {"name": "num_output_tokens", "data_type": "TYPE_UINT32", "dims": [-1]},
    {"name": "num_cached_tokens", "data_type": "TYPE_UINT32", "dims": [1]},
    {"name": "sequence_index", "data_type": "TYPE_UINT32", "dims": [-1]},
    {"name": "logprobs", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "cumulative_logprob", "data_type": "TYPE_FP32", "dims": [-1]},
    {"name": "prompt_logprobs", "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "output_ids", "data_type": "TYPE_INT32", "dims": [-1]},
    {"name": "reasoning_content", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "tool_calls", "data_type": "TYPE_STRING", "dims": [-1]},
)


_OUTPUTS_OF_TRTLLM = (
    {"name": "cum_log_probs", "data_type": "TYPE_FP32", "dims": [-1]},
    {"name": "output_log_probs", "data_type": "TYPE_FP32", "dims": [-1, -1]},
)


def declared_outputs(contract: str) -> tuple[dict[str, Any], ...]:
    return (*_OUTPUTS, *_OUTPUTS_OF_TRTLLM) if contract == TRTLLM else _OUTPUTS


def declared_inputs(contract: str) -> list[dict[str, Any]]:
    """All of them optional: a prompt has three spellings."""
    names = (*_COMMON, *_OF_TRTLLM) if contract == TRTLLM else _COMMON
    return [
        _tensor("text_input", "TYPE_STRING", 1),
        _tensor("input_ids", "TYPE_INT32", -1),
        _tensor("messages", "TYPE_STRING", 1),
        *(_input(name) for name in names),
        _tensor(STOP, "TYPE_BOOL", 1) if contract == TRTLLM else _tensor(STOP, "TYPE_STRING", -1),
    ]


def _input(name: str) -> dict[str, Any]:
    field = FIELDS.get(ALIASES.get(name, name))
    if field is None:
        return _tensor(name, "TYPE_STRING", 1)
    data_type = _TYPES_BY_NAME.get(name) or _TYPES.get(field.kind, "TYPE_STRING")
    return _tensor(name, data_type, -1 if field.is_list else 1)


def _tensor(name: str, data_type: str, dim: int) -> dict[str, Any]:
    return {"name": name, "data_type": data_type, "dims": [dim], "optional": True}


def response(replies: list[Reply], news: list[int] | None = None, contract: str = VLLM) -> dict[str, np.ndarray]:
    """A response's arrays under a contract.

    Args:
        replies: of each sequence.
        news: where a request has several sequences, those that have something new.
    """
    if contract != TRTLLM:
        return _arrays(replies, news)
    # Its clients read one sequence per response, the one that `sequence_index` names.
    replies = replies if news is None else [replies[index] for index in news]
    arrays = _arrays(replies, news) | _of_trtllm(replies)
    return {name: array if name in _FLAT else array[np.newaxis] for name, array in arrays.items()}


# What tensorrtllm_backend sends without a batch dimension, whatever it declares; Triton does not compare.
_FLAT = ("text_output",)


def _of_trtllm(replies: list[Reply]) -> dict[str, np.ndarray]:
    """Its own names for log-probabilities. Where one sequence has fewer tokens than another, zeros fill its row."""
    if not replies[0].output.logprobs:
        return {}
    rows = [reply.tokens.chosen for reply in replies]
    filled = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for row, values in zip(filled, rows, strict=True):
        row[: len(values)] = values
    return {"output_log_probs": filled, "cum_log_probs": _sums(replies)}


def _sums(replies: list[Reply]) -> np.ndarray:
    return np.array([reply.tokens.cumulative_logprob for reply in replies], np.float32)


def _arrays(replies: list[Reply], news: list[int] | None) -> dict[str, np.ndarray]:
    """An element per sequence. Some are there only when the client asked for them."""
    output, first = replies[0].output, replies[0]
    arrays = {"text_output": _strings([reply.text for reply in replies])}
    if output.finish_reason:
        arrays["finish_reason"] = _strings([reply.reason for reply in replies])
    if output.num_input_tokens:
        arrays["num_input_tokens"] = np.array([first.num_input_tokens], np.uint32)
    if output.num_output_tokens:
        arrays["num_output_tokens"] = np.array([reply.num_tokens for reply in replies], np.uint32)
    if output.num_cached_tokens:
        arrays["num_cached_tokens"] = np.array([first.num_cached_tokens], np.uint32)
    if news is not None:
        arrays["sequence_index"] = np.array(news, np.uint32)
    if output.reasoning_content:
        arrays["reasoning_content"] = _strings([reply.chat.reasoning for reply in replies])
    if output.tool_calls:
        arrays["tool_calls"] = _strings([reply.chat.tool_calls for reply in replies])
    return arrays | _of_tokens(output, replies)


def _of_tokens(output: OutputOptions, replies: list[Reply]) -> dict[str, np.ndarray]:
    tokens, arrays = [reply.tokens for reply in replies], {}
    if output.logprobs:
        arrays["logprobs"] = _strings([each.logprobs for each in tokens])
    if output.cumulative_logprob:
        arrays["cumulative_logprob"] = _sums(replies)
    if output.prompt_logprobs:
        arrays["prompt_logprobs"] = _strings([tokens[0].prompt_logprobs])
    if output.output_ids:
        arrays["output_ids"] = np.array([token_id for each in tokens for token_id in each.token_ids], np.int32)
    return arrays


def _strings(values: list[str]) -> np.ndarray:
    return np.array([value.encode() for value in values], dtype=np.object_)
