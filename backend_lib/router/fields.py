"""Every field a client may set, in one table: its kind, what is allowed, where it goes and what it means.

A new field is one line in `_TABLE`, an attribute of the noun it goes to, and its use.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from backend_lib.config import MAX_GROUPS
from backend_lib.request import GenerationRequest, OutputOptions, SamplingParams
from backend_lib.router import grammars
from backend_lib.router.field import Field
from backend_lib.router.kinds import (
    BIAS,
    CHOICE,
    COUNT,
    INTEGER,
    JSON,
    MAX_BIAS,
    NULL,
    NUMBER,
    STRINGS,
    TEXTS,
    TOKEN_IDS,
    TRUTH,
    Kind,
)

INT32_MAX = (1 << 31) - 1
MAX_BIASES = 1024
MAX_N = 64
MAX_PROMPT_IDS = 1 << 24
MAX_LOGPROBS = 20
MAX_STOP_CHARS = 1024

# Keys that Triton, its clients and its proxies put among the request parameters; they are not ours to judge.
_TRITON_PARAMETERS = frozenset(
    {"binary_data_output", "headers", "id", "priority", "sequence_end", "sequence_id", "sequence_start", "timeout"}
)


def is_triton_parameter(key: str) -> bool:
    """Whether a request parameter belongs to the server. A hyphen marks a forwarded HTTP header; no field has one."""
    return key in _TRITON_PARAMETERS or key.startswith("triton_") or "-" in key


def _sampling(name: str, kind: Kind, low: float = 0, high: float = 1, *aliases: str, **more: Any) -> Field:
    return Field(name=name, aliases=aliases, kind=kind, low=low, high=high, noun=SamplingParams, attribute=name, **more)


def _grammar(name: str, kind: Kind, help: str) -> Field:
    """Only one of these may be given, so that they can share an attribute."""
    return Field(name=name, kind=kind, noun=SamplingParams, attribute="grammar", help=help)


def _output(name: str, attribute: str, *aliases: str, kind: Kind = TRUTH, **more: Any) -> Field:
    return Field(name=name, aliases=aliases, kind=kind, noun=OutputOptions, attribute=attribute, **more)


def _request(name: str, kind: Kind, attribute: str, *aliases: str, **more: Any) -> Field:
    return Field(name=name, aliases=aliases, kind=kind, noun=GenerationRequest, attribute=attribute, **more)


def _only(name: str, kind: Kind, value: float, *aliases: str, **more: Any) -> Field:
    """A field that clients send at the value which leaves it off, as Triton's OpenAI frontend does."""
    return Field(name=name, aliases=aliases, kind=kind, low=value, high=value, **more)


# Fields of vLLM and vllm_backend, which clients send at null.
_NULL = (
    *("truncate_prompt_tokens", "logits_processors", "extra_args", "logprob_token_ids", "thinking_token_budget"),
    *("repetition_detection", "guided_decoding_backend", "guided_whitespace_pattern", "lora_name"),
)

_TABLE = (
    _request(
        "input_ids", TOKEN_IDS, "prompt_ids", "prompt_token_ids", count=MAX_PROMPT_IDS,
        help="the prompt as token ids, in place of `text_input`",
    ),
    Field(name="input_lengths", kind=INTEGER, low=1, high=INT32_MAX, help="how many of `input_ids` are the prompt"),
    Field(name="messages", kind=JSON, help="the prompt as a conversation: a list of OpenAI's messages"),
    Field(name="tools", kind=JSON, help="what the model may call: a list of OpenAI's tools"),
    Field(name="tool_choice", kind=CHOICE, help="none leaves `tools` out"),
    Field(name="chat_template_kwargs", kind=JSON, help="more variables for the chat template"),
    Field(name="add_generation_prompt", kind=TRUTH, help="the conversation ends where the model is to speak"),
    Field(name="cancel", kind=TRUTH, help="end the requests that have this one's id; only as an input or a parameter"),
    _sampling(
        "max_tokens", INTEGER, 1, INT32_MAX, "request_output_len", "sampling_param_max_tokens",
        help="output tokens at most; the server's default if not given",
    ),
    _sampling(
        "min_tokens", INTEGER, 0, INT32_MAX, "min_length",
        help="output tokens before anything but the length may end it",
    ),
    _sampling(
        "temperature", NUMBER, 0, 1e6, "sampling_param_temperature",
        help="0 is greedy; below 1 sharpens, above 1 flattens",
    ),
    _sampling(
        "top_k", INTEGER, -1, INT32_MAX, "runtime_top_k", "sampling_param_top_k",
        help="draw from the k likeliest tokens; 0, -1: all",
    ),
    _sampling(
        "top_p", NUMBER, 0, 1, "runtime_top_p", "sampling_param_top_p", above=True, off=0,
        help="draw from the fewest tokens that hold this probability",
    ),
    _sampling("min_p", NUMBER, 0, 1, help="draw from tokens of at least this share of the likeliest one's probability"),
    _sampling(
        "repetition_penalty", NUMBER, 1e-4, 1e6,
        help="divides the logits, or multiplies the negative ones, of tokens in prompt and output",
    ),
    _sampling(
        "presence_penalty", NUMBER, -2, 2, "sampling_param_presence_penalty",
        help="taken from the logits of tokens in the output",
    ),
    _sampling(
        "frequency_penalty", NUMBER, -2, 2, "sampling_param_frequency_penalty",
        help="taken from the logits of tokens in the output as often as they are there",
    ),
    _sampling(
        "logit_bias", BIAS, -MAX_BIAS, MAX_BIAS, count=MAX_BIASES, help="token ids and what is added to their logits"
    ),
    _sampling("bad_words", TEXTS, 0, MAX_STOP_CHARS, "bad", help="texts that the output must not contain"),
    _sampling("allowed_token_ids", TOKEN_IDS, count=None, help="the only tokens; an empty list is all"),
    _sampling(
        "seed", INTEGER, -(1 << 63), (1 << 64) - 1, "random_seed", "sampling_param_seed",
        help="repeats a draw; -1 is none, other negatives wrap",
    ),
    _sampling("ignore_eos", TRUTH, help="go on after the end-of-sequence token"),
    _sampling(
        "n", INTEGER, 1, MAX_N, "num_return_sequences", help="sequences to draw from the prompt, which is computed once"
    ),
    Field(
        name="best_of", aliases=("sampling_param_best_of",), kind=INTEGER, low=1, high=MAX_N,
        help="as many as `n`: none is drawn to be dropped",
    ),
    _sampling(
        "stop", TEXTS, 0, MAX_STOP_CHARS, "stop_words", "sampling_param_stop",
        help="texts that end the output, without them",
    ),
    _sampling("stop_token_ids", TOKEN_IDS, 0, 1, "end_id", off=-1, help="token ids that end the output"),
    _sampling("include_stop_str_in_output", TRUTH, help="the output keeps the stop string, or token, that ended it"),
    _sampling("skip_special_tokens", TRUTH, help="special tokens have no text"),
    _sampling("logprobs", COUNT, 0, MAX_LOGPROBS, help="likeliest tokens beside the chosen one in output logprobs"),
    _sampling("prompt_logprobs", COUNT, 0, MAX_LOGPROBS, help="the same for the prompt, in output prompt_logprobs"),
    _grammar("guided_json", grammars.SCHEMA, "the output is JSON of this schema"),
    _grammar("guided_regex", grammars.REGEX, "the output matches this expression"),
    _grammar("guided_choice", grammars.CHOICES, "the output is one of these"),
    _grammar("guided_grammar", grammars.EBNF, "the output is what this grammar says"),
    _grammar("guided_json_object", grammars.JSON_OBJECT, "the output is a JSON object"),
    _grammar("structured_outputs", grammars.STRUCTURE, "vLLM's spelling of the five above"),
    _grammar("guided_decoding", grammars.STRUCTURE, "the same under its older name"),
    _grammar("response_format", grammars.RESPONSE_FORMAT, "OpenAI's spelling"),
    Field(
        name="guided_decoding_guide_type", kind=grammars.GUIDE_TYPE, help="json is any object; else what the guide is"
    ),
    Field(name="guided_decoding_guide", kind=grammars.GUIDE, help="the schema, expression or grammar"),
    _output("stream", "stream", "streaming", help="one response per step instead of one in all"),
    _output("return_finish_reason", "finish_reason", help="send the output finish_reason"),
    _output("return_num_input_tokens", "num_input_tokens", help="send the output num_input_tokens"),
    _output("return_num_output_tokens", "num_output_tokens", help="send the output num_output_tokens"),
    _output("return_num_cached_tokens", "num_cached_tokens", help="send the output num_cached_tokens"),
    _output("return_logprobs", "logprobs", "return_log_probs", help="send the output logprobs"),
    _output("return_cumulative_logprob", "cumulative_logprob", help="send the output cumulative_logprob"),
    _output("return_prompt_logprobs", "prompt_logprobs", help="send the output prompt_logprobs"),
    _output("return_output_ids", "output_ids", help="send the output output_ids"),
    _output("return_reasoning_content", "reasoning_content", help="take reasoning out, into output reasoning_content"),
    _output("return_tool_calls", "tool_calls", help="take calls of tools out, into output tool_calls"),
    _output(
        "stream_interval", "stream_interval", kind=INTEGER, low=1, high=INT32_MAX, help="tokens per response at least"
    ),
    _request("request_priority", INTEGER, "priority", low=-INT32_MAX, high=INT32_MAX, help="higher goes first"),
    _request("disable_prompt_cache", TRUTH, "disable_prompt_cache", help="do not read or fill the prefix cache"),
    _request(
        "dp_rank", INTEGER, "dp_rank", low=0, high=MAX_GROUPS - 1,
        help="which copy of the weights computes it, of `data_parallel`; the router chooses if not given",
    ),
    Field(
        name="exclude_input_in_output",
        aliases=("sampling_param_exclude_input_from_output",),
        kind=TRUTH,
        help="leave the prompt out; without streaming it comes first",
    ),
    Field(name="pad_id", kind=INTEGER, low=-1, high=INT32_MAX, help="without meaning: nothing is padded"),
    _only("beam_width", INTEGER, 1),
    _only("length_penalty", NUMBER, 1, "len_penalty", off=0),
    _only("return_context_logits", TRUTH, 0),
    _only("return_generation_logits", TRUTH, 0),
    _only("return_perf_metrics", TRUTH, 0),
    _only("return_kv_cache_reuse_stats", TRUTH, 0),
    _only("use_beam_search", TRUTH, 0),
    _only("early_stopping", TRUTH, 0),
    _only("image", STRINGS, 0),
    _only("detokenize", TRUTH, 1),
    _only("spaces_between_special_tokens", TRUTH, 1),
    _only("flat_logprobs", TRUTH, 0),
    _only("output_kind", INTEGER, 0),
    *(_only(name, NULL, 0) for name in _NULL),
)  # fmt: skip

# Triton reads this parameter of a gRPC request itself, and leaves that of a generate request to us.
TIMEOUT = Field(name="timeout", kind=INTEGER, low=0, high=(1 << 63) - 1, help="microseconds; 0 is no deadline")

FIELDS: dict[str, Field] = {entry.name: entry for entry in _TABLE}
ALIASES: dict[str, str] = {alias: entry.name for entry in _TABLE for alias in entry.aliases}


@functools.cache
def fields_for(data_parallel: int) -> dict[str, Field]:
    """The table as it is for a server with so many groups."""
    return FIELDS | {"dp_rank": replace(FIELDS["dp_rank"], high=data_parallel - 1)}
