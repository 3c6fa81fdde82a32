"""The tables of docs/fields.md, made of the table of fields: `python -m tests.support.fields_page` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backend_lib.router import tensors
from backend_lib.router.field import Field
from backend_lib.router.fields import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "fields.md"
BEGIN, END = "<!-- {}: begin -->\n", "<!-- {}: end -->"

# Names that vllm_backend, or vLLM behind it, does not have.
_NOT_OF_VLLM = {
    "input_ids", "input_lengths", "messages", "tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt",
    "cancel", "guided_decoding_guide_type", "guided_decoding_guide", "return_num_cached_tokens", "return_output_ids",
    "return_prompt_logprobs", "return_reasoning_content", "return_tool_calls", "stream_interval", "request_priority",
    "disable_prompt_cache", "dp_rank", "pad_id", "beam_width", "return_context_logits", "return_generation_logits",
    "return_perf_metrics", "return_kv_cache_reuse_stats", "early_stopping", "response_format",
}  # fmt: skip
_VLLM = {"input_ids": "prompt_token_ids"}
# Names that tensorrtllm_backend shares; where it has others they are the aliases.
_OF_TRTLLM = {
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "bad_words", "seed", "stream", "length_penalty", "beam_width", "early_stopping", "pad_id",
    "input_ids", "input_lengths", "guided_decoding_guide_type", "guided_decoding_guide", "exclude_input_in_output",
    "return_num_input_tokens", "return_num_output_tokens", "return_context_logits", "return_generation_logits",
    "return_perf_metrics", "return_kv_cache_reuse_stats",
}  # fmt: skip
_TRTLLM = {"cancel": ("stop (BOOL)",)}

_SAMPLING = "tests/engine/test_sampling.py::test_rules_beside_each_other"
_GRAMMAR = "tests/engine/test_structured.py::test_constrained_rows_beside_others"
_OBEYED = "tests/server/test_contract.py::test_a_field_as_plain_parameter_nested_parameter_and_json"
_LOGPROBS = "tests/server/test_outputs.py::test_log_probabilities"
_OUTPUTS = "tests/server/test_contract.py::test_what_to_return_may_stand_among_the_sampling_parameters"
_TOKEN_IDS = "tests/server/test_outputs.py::test_a_prompt_of_token_ids"
_CHAT = "tests/server/test_outputs.py::test_a_conversation"
_TOOLS = "tests/server/test_outputs.py::test_tools_stand_in_the_prompt_unless_none_is_the_choice"
_OFF = "tests/unit/test_fields.py::test_what_a_field_refuses"

# Where a test fails if the field is ignored or mixed up.
_TESTS = {
    _OBEYED: ("max_tokens", "temperature", "top_k", "top_p", "stop", "stop_token_ids"),
    _SAMPLING: (
        "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "bad_words",
        "allowed_token_ids",
    ),
    _GRAMMAR: (
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object",
    ),
    "tests/unit/test_fields.py::test_spellings_of_a_grammar": (
        "structured_outputs", "guided_decoding", "response_format", "guided_decoding_guide_type",
        "guided_decoding_guide",
    ),
    _LOGPROBS: ("logprobs", "return_logprobs", "return_cumulative_logprob"),
    "tests/server/test_outputs.py::test_log_probabilities_of_the_prompt": ("prompt_logprobs", "return_prompt_logprobs"),
    "tests/server/test_outputs.py::test_output_ids": ("return_output_ids",),
    "tests/server/test_outputs.py::test_the_stop_string_may_stay": ("include_stop_str_in_output",),
    "tests/server/test_outputs.py::test_special_tokens_may_be_text": ("skip_special_tokens",),
    "tests/server/test_contract.py::test_ignore_eos_and_min_tokens": ("ignore_eos", "min_tokens"),
    "tests/server/test_contract.py::test_a_seed_repeats_a_draw_and_none_does_not": ("seed",),
    "tests/server/test_grpc.py::test_several_sequences_have_an_element_each": ("n",),
    "tests/unit/test_fields.py::test_best_of_is_as_many_as_n": ("best_of",),
    _OUTPUTS: ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"),
    "tests/server/test_grpc.py::test_cached_tokens_are_told": ("return_num_cached_tokens",),
    "tests/server/test_outputs.py::test_reasoning_is_an_output_of_its_own": (
        "return_reasoning_content", "chat_template_kwargs",
    ),
    "tests/unit/test_conversation.py::test_calls_of_tools_are_an_output_of_their_own": ("return_tool_calls",),
    "tests/server/test_contract.py::test_exclude_input_in_output": ("exclude_input_in_output", "stream"),
    "tests/server/test_generate.py::test_stream_interval_makes_fewer_events": ("stream_interval",),
    "tests/engine/test_siblings.py::test_a_higher_priority_goes_first": ("request_priority",),
    "tests/engine/test_siblings.py::test_a_request_may_keep_out_of_the_prefix_cache": ("disable_prompt_cache",),
    "tests/server/test_groups.py::test_a_request_may_name_its_group": ("dp_rank",),
    _TOKEN_IDS: ("input_ids",),
    "tests/server/test_trtllm.py::test_a_prompt_of_ids_with_its_length": ("input_lengths",),
    _CHAT: ("messages",),
    _TOOLS: ("tools", "tool_choice"),
    "tests/unit/test_prompts.py::test_a_conversation": ("add_generation_prompt",),
    "tests/server/test_cancel.py::test_a_running_request_is_ended_from_another_connection": ("cancel",),
    "tests/server/test_trtllm.py::test_each_name_is_obeyed": ("pad_id",),
    _OFF: (
        "beam_width", "length_penalty", "use_beam_search", "early_stopping", "image", "return_context_logits",
        "return_generation_logits", "return_perf_metrics", "return_kv_cache_reuse_stats", "detokenize",
        "spaces_between_special_tokens", "flat_logprobs", "output_kind", "truncate_prompt_tokens", "logits_processors",
        "extra_args", "lora_name",
    ),
    "tests/unit/test_fields.py::test_null_is_nothing": (
        "logprob_token_ids", "thinking_token_budget", "repetition_detection", "guided_decoding_backend",
        "guided_whitespace_pattern",
    ),
}  # fmt: skip
TESTS = {name: test for test, names in _TESTS.items() for name in names}


OUTPUTS = {
    "text_output": "the text since the last response",
    "finish_reason": "`stop`, `length`, `tool_calls`, or `None` while it goes on",
    "num_input_tokens": "tokens of the prompt",
    "num_output_tokens": "tokens since the last response, with the one that ended it",
    "num_cached_tokens": "tokens of the prompt that were in the prefix cache",
    "sequence_index": "with `n` above 1: whose news this response has",
    "logprobs": 'since the last response, a JSON list of `{token id: {"logprob", "rank", "decoded_token"}}`, the '
    "chosen token first; `null` if there is none",
    "cumulative_logprob": "of all tokens so far",
    "prompt_logprobs": "the same for the prompt, whose first token has `null`; in the first response, then `null`",
    "output_ids": "tokens since the last response; with `n` above 1 one sequence's behind the other's, as many as "
    "`num_output_tokens` says, which then comes too",
    "reasoning_content": "reasoning since the last response",
    "tool_calls": "a JSON list of the calls that are complete since the last response",
    "cum_log_probs": "tensorrtllm_backend's `cumulative_logprob`; only with `contract` `trtllm` and `return_log_probs`",
    "output_log_probs": "the chosen tokens' log-probabilities, a row per sequence; likewise",
}


def fields_table() -> str:
    rows = [
        "| field | vllm_backend | tensorrtllm_backend | type | allowed | default | meaning | test |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*rows, *map(_row, FIELDS.values())])


def inputs_table(contract: str) -> str:
    return "\n".join(["| input | type |", "| --- | --- |", *map(_tensor_row, tensors.declared_inputs(contract))])


def outputs_table() -> str:
    outputs = tensors.declared_outputs(tensors.TRTLLM)
    rows = (_tensor_row(each, OUTPUTS) for each in outputs)
    return "\n".join(["| output | type | what |", "| --- | --- | --- |", *rows])


def written(page: str) -> str:
    """The page with its tables as they should be."""
    tables = {
        "fields": fields_table(),
        "inputs": inputs_table(tensors.VLLM),
        "inputs of trtllm": inputs_table(tensors.TRTLLM),
        "outputs": outputs_table(),
    }
    for name, table in tables.items():
        head, rest = page.split(BEGIN.format(name))
        page = f"{head}{BEGIN.format(name)}{table}\n{END.format(name)}{rest.split(END.format(name))[1]}"
    return page


def _row(field: Field) -> str:
    vllm = None if field.name in _NOT_OF_VLLM and field.name not in _VLLM else _VLLM.get(field.name, field.name)
    shared = (field.name,) if field.name in _OF_TRTLLM else ()
    others = tuple(alias for alias in field.aliases if alias != vllm)
    cells = (
        f"`{field.name}`", _names((vllm,) if vllm else ()), _names((*shared, *_TRTLLM.get(field.name, ()), *others)),
        field.kind.name, _allowed(field), _default(field), field.help or "only the value that leaves it off",
        f"`{TESTS[field.name]}`",
    )  # fmt: skip
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def _allowed(field: Field) -> str:
    if not field.is_supported:
        return field.allowed(1).removeprefix("only ").removesuffix(" is supported")
    return field.words("the vocabulary's last", "the vocabulary's size" if field.count is None else str(field.count))


def _default(field: Field) -> str:
    default: Any = field.default
    if default is None or default == ():
        return "–"
    return f"`{str(default).lower()}`"


def _tensor_row(spec: dict[str, Any], meanings: Mapping[str, str] = MappingProxyType({})) -> str:
    shape = f"{spec['data_type'].removeprefix('TYPE_')} [{', '.join(map(str, spec['dims']))}]"
    return f"| `{spec['name']}` | {shape} |" + (f" {meanings[spec['name']]} |" if meanings else "")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
