"""From a client's tensors and parameters to one `GenerationRequest`.

A field's value is its tensor, else what the JSON object `sampling_parameters` says, else the request parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from backend_lib.checkpoint import Checkpoint
from backend_lib.config import Settings
from backend_lib.request import Chat, GenerationRequest, Grammar, OutputOptions, SamplingParams
from backend_lib.router.chat import ChatError, parse_template_kwargs
from backend_lib.router.field import Field
from backend_lib.router.fields import FIELDS, TIMEOUT, fields_for
from backend_lib.router.grammars import guided, the_one
from backend_lib.router.kinds import Explained
from backend_lib.router.refusals import RequestError, refuse
from backend_lib.router.sources import TEXT, Raw, given_values, tensor_value
from backend_lib.router.tensors import STOP, TRTLLM

# Only a template reads these.
_OF_CHAT = ("tools", "tool_choice", "chat_template_kwargs", "add_generation_prompt")

_PROMPTS = (TEXT, "input_ids", "messages")

# Below this a draw is greedy in all but name, and dividing logits by it overflows in float32. vLLM's bound.
_GREEDY_BELOW = 1e-5

# The device compares in float32, where less than this would be 0 and leave no token at all.
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)


def parse_request(
    tensors: Mapping[str, np.ndarray],
    parameters: Mapping[str, Any],
    request_id: str,
    timeout_us: int,
    settings: Settings,
    vocab_size: int,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> GenerationRequest:
    """Validate one request.

    Args:
        tensors: by input name, as Triton's Python backend gives them (STRING is an object array of bytes).
        parameters: the request parameters; values are int, float, bool or str.
        defaults: parsed values by field name, which apply where the request does not say.
        timeout_us: as Triton understood it; 0 means that `timeout` may stand among the parameters.

    Raises:
        RequestError: names the field, its value and what is allowed.
    """
    if settings.contract == TRTLLM:
        tensors = {("cancel" if name == STOP else name): array for name, array in tensors.items()}
    values = _Values(given_values(tensors, parameters), defaults, settings, vocab_size)
    if values.get("cancel"):
        values.refuse("cancel", True, "allowed is true as an input or a request parameter of its own")
    output = _output(values, settings)
    return GenerationRequest(
        request_id=request_id,
        **_prompt(tensors, values),
        sampling=_sampling(values, output, vocab_size),
        output=output,
        priority=values.get("request_priority", 0),
        disable_prompt_cache=values.get("disable_prompt_cache", False),
        dp_rank=values.get("dp_rank"),
        timeout_us=timeout_us or _parse(TIMEOUT, Raw(TIMEOUT.name, parameters.get(TIMEOUT.name, 0)), vocab_size),
        names=values.names,
    )


class _Values(dict[str, Any]):
    """Parsed values by field name, of the client before the checkpoint's, and what the client called its fields."""

    def __init__(
        self, given: Mapping[str, Raw], defaults: Mapping[str, Any], settings: Settings, vocab_size: int
    ) -> None:
        super().__init__(defaults)
        self.names = {name: raw.called for name, raw in given.items()}
        fields = fields_for(settings.data_parallel)
        for name, raw in given.items():
            is_of_trtllm = settings.contract == TRTLLM or raw.called != name
            if not (is_of_trtllm and fields[name].is_off(raw.value)):
                self[name] = _parse(fields[name], raw, vocab_size)

    def called(self, name: str) -> str:
        return self.names.get(name, name)

    def refuse(self, name: str, value: Any, allowed: str) -> NoReturn:
        refuse(self.called(name), value, allowed)


def checkpoint_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the checkpoint says of sampling, parsed like a client's values.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    try:
        return {
            name: _parse(FIELDS[name], Raw(name, value), checkpoint.config.vocab_size)
            for name, value in checkpoint.sampling.given().items()
        }
    except RequestError as error:
        raise ValueError(f"{checkpoint.name} asks for sampling that cannot be done: {error}") from None


def _prompt(tensors: Mapping[str, np.ndarray], values: _Values) -> dict[str, Any]:
    """The request's prompt, in the one spelling that the client has used."""
    given = [name for name in _PROMPTS if name in (tensors if name == TEXT else values)]
    if not given:
        raise RequestError(f"'{TEXT}' is missing; allowed is one of {', '.join(_PROMPTS)}")
    if len(given) > 1:
        first, second = map(values.called, given[:2])
        raise RequestError(f"'{first}' and '{second}' are both given; allowed is one of {', '.join(_PROMPTS)}")
    if given == ["messages"]:
        return {"chat": _chat(values)}
    _check_no_chat(values)
    return {"text": _text(tensors[TEXT])} if given == [TEXT] else {"prompt_ids": _prompt_ids(values)}


def _check_no_chat(values: _Values) -> None:
    """An empty list or object is nothing."""
    for name in _OF_CHAT:
        if values.get(name) not in (None, [], {}, "[]", "{}"):
            raise RequestError(f"'{name}' is given without 'messages'; allowed is only with them")


def _text(array: np.ndarray) -> str:
    """A NUL is a character like any other: tokenizers take it."""
    text = tensor_value(TEXT, array)
    if not isinstance(text, str) or not text:
        refuse(TEXT, text, "allowed is one string that is not empty")
    return text


def _prompt_ids(values: _Values) -> tuple[int, ...]:
    ids: tuple[int, ...] = values["input_ids"]
    count = values.get("input_lengths", len(ids))
    if not ids:
        values.refuse("input_ids", [], "allowed is at least one token id")
    if count > len(ids):
        called = values.called("input_ids")
        values.refuse("input_lengths", count, f"allowed is at most the number of '{called}', which is {len(ids)}")
    return ids[:count]


def _chat(values: Mapping[str, Any]) -> Chat:
    try:
        variables = parse_template_kwargs(values.get("chat_template_kwargs"))
    except ChatError as error:
        raise RequestError(str(error)) from None
    return Chat(
        messages=values["messages"],
        tools=values.get("tools") if values.get("tool_choice") != "none" else None,
        add_generation_prompt=values.get("add_generation_prompt", True),
        variables=variables,
    )


def _parse(field: Field, raw: Raw, vocab_size: int) -> Any:
    try:
        return field.parse(raw.value, vocab_size)
    except Explained as error:
        refuse(raw.called, raw.value, f"{field.allowed(vocab_size)} ({error})")
    except ValueError:
        refuse(raw.called, raw.value, field.allowed(vocab_size))


def _sampling(values: _Values, output: OutputOptions, vocab_size: int) -> SamplingParams:
    """Sampling parameters in one spelling: greedy is temperature 0, the whole vocabulary is top_k 0."""
    own = _attributes(values, SamplingParams) | {"grammar": _grammar(values)}
    if own.get("min_tokens", 0) > own.get("max_tokens", own.get("min_tokens", 0)):
        most = f"{values.called('max_tokens')}, which is {own['max_tokens']}"
        values.refuse("min_tokens", own["min_tokens"], f"allowed is at most {most}")
    if values.get("best_of", 1) not in (1, n := own.get("n", 1)):
        values.refuse("best_of", values["best_of"], f"allowed is as many as '{values.called('n')}', which is {n}")
    if own.get("temperature", 1.0) < _GREEDY_BELOW:
        own["temperature"] = 0.0
    own["top_p"] = max(own.get("top_p", 1.0), _LEAST_TOP_P)
    if not 0 < own.get("top_k", 0) < vocab_size:
        own["top_k"] = 0
    if "seed" in own:
        own["seed"] = None if own["seed"] == -1 else own["seed"] % (1 << 64)
    wanted = {"logprobs": output.logprobs or output.cumulative_logprob, "prompt_logprobs": output.prompt_logprobs}
    return SamplingParams(**own | {name: _count(own.get(name), wants) for name, wants in wanted.items()})


def _count(count: int | None, is_wanted: bool) -> int | None:
    """How many log-probabilities to compute: none that nobody sees, and the chosen token's at least."""
    return (count or 0) if is_wanted else None


def _grammar(values: _Values) -> Grammar | None:
    """What the output must match, however it was said."""
    asked = {name: values[name] for name, field in FIELDS.items() if field.attribute == "grammar" and name in values}
    guide_type, guide = values.get("guided_decoding_guide_type"), values.get("guided_decoding_guide")
    if guide and not guide_type:
        raise RequestError("'guided_decoding_guide_type' is missing; allowed is what 'guided_decoding_guide' is")
    try:
        if guide_type:
            said = "guided_decoding_guide" if guide else "guided_decoding_guide_type"
            asked[said] = guided(guide_type, guide)
    except ValueError as error:
        refuse(
            "guided_decoding_guide", guide, f"allowed is what guided_decoding_guide_type {guide_type} says ({error})"
        )
    try:
        return the_one(asked)
    except ValueError as error:
        raise RequestError(str(error)) from None


def _output(values: _Values, settings: Settings) -> OutputOptions:
    """Output options. As in vllm_backend the prompt comes first unless the client streams or excludes it; a
    conversation does not."""
    own = {"stream_interval": settings.stream_interval} | _attributes(values, OutputOptions)
    stream = own.get("stream", False)
    exclude = values.get("exclude_input_in_output", stream or "messages" in values)
    if stream and not exclude:
        values.refuse("exclude_input_in_output", False, "allowed is true when streaming")
    if own.get("output_ids") and values.get("n", 1) > 1:
        own["num_output_tokens"] = True  # which ids are whose
    return OutputOptions(**own, echo_prompt=not exclude)


def _attributes(values: Mapping[str, Any], noun: type) -> dict[str, Any]:
    return {FIELDS[name].attribute: value for name, value in values.items() if FIELDS[name].noun is noun}
