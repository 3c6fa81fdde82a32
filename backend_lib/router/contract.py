"""From a client's tensors and parameters to one `GenerationRequest`.

A field's value is its tensor, else what the JSON object `sampling_parameters` says, else the request parameter.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from backend_lib.checkpoint import Checkpoint
from backend_lib.config import Settings
from backend_lib.request import Chat, GenerationRequest, Grammar, OutputOptions, SamplingParams
from backend_lib.router.chat import ChatError, parse_template_kwargs
from backend_lib.router.fields import ALIASES, FIELDS, TIMEOUT, Field, is_triton_parameter
from backend_lib.router.grammars import guided, the_one
from backend_lib.router.kinds import Explained, load_json
from backend_lib.router.tensors import STOP, TRTLLM

_TEXT = "text_input"
_PROMPTS = (_TEXT, "input_ids", "messages")
_JSON = "sampling_parameters"

# Below this a draw is greedy in all but name, and dividing logits by it overflows in float32. vLLM's bound.
_GREEDY_BELOW = 1e-5

# The device compares in float32, where less than this would be 0 and leave no token at all.
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)

_MAX_SHOWN = 80
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _MAX_SHOWN


class RequestError(ValueError):
    """The client's mistake, in words for the client: the field, its value and what is allowed."""


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
    given = {name: _parse(FIELDS[name], raw, vocab_size) for name, raw in _given_values(tensors, parameters).items()}
    values = {**defaults, **given}
    if values.get("cancel"):
        _refuse("cancel", True, "allowed is true as an input or a request parameter of its own")
    output = _output(values, settings)
    return GenerationRequest(
        request_id=request_id,
        **_prompt(tensors, values),
        sampling=_sampling(values, output, vocab_size),
        output=output,
        priority=values.get("request_priority", 0),
        disable_prompt_cache=values.get("disable_prompt_cache", False),
        timeout_us=timeout_us or _parse(TIMEOUT, parameters.get(TIMEOUT.name, 0), vocab_size),
    )


def checkpoint_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the checkpoint says of sampling, parsed like a client's values.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    try:
        return {
            name: _parse(FIELDS[name], value, checkpoint.config.vocab_size)
            for name, value in checkpoint.sampling.given().items()
        }
    except RequestError as error:
        raise ValueError(f"{checkpoint.name} asks for sampling that cannot be done: {error}") from None


def _prompt(tensors: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> dict[str, Any]:
    """The request's prompt, in the one spelling that the client has used."""
    given = [name for name in _PROMPTS if name in (tensors if name == _TEXT else values)]
    if not given:
        raise RequestError(f"'{_TEXT}' is missing; allowed is one of {', '.join(_PROMPTS)}")
    if len(given) > 1:
        raise RequestError(f"'{given[0]}' and '{given[1]}' are both given; allowed is one of {', '.join(_PROMPTS)}")
    if given == [_TEXT]:
        return {"text": _text(tensors[_TEXT])}
    return {"prompt_ids": _prompt_ids(values)} if given == ["input_ids"] else {"chat": _chat(values)}


def _text(array: np.ndarray) -> str:
    """A NUL is a character like any other: tokenizers take it."""
    text = _tensor_value(_TEXT, array)
    if not isinstance(text, str) or not text:
        _refuse(_TEXT, text, "allowed is one string that is not empty")
    return text


def _prompt_ids(values: Mapping[str, Any]) -> tuple[int, ...]:
    ids: tuple[int, ...] = values["input_ids"]
    count = values.get("input_lengths", len(ids))
    if not ids:
        _refuse("input_ids", [], "allowed is at least one token id")
    if count > len(ids):
        _refuse("input_lengths", count, f"allowed is at most the number of 'input_ids', which is {len(ids)}")
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


def is_cancellation(tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any], settings: Settings) -> bool:
    """Whether the request is an order to end others. One that cannot be understood is left to `parse_request`."""
    given = parameters.get("cancel", False)
    for name in ("cancel", STOP) if settings.contract == TRTLLM else ("cancel",):
        given = tensors[name].reshape(-1).tolist() if name in tensors else given
    given = given[0] if isinstance(given, list) and len(given) == 1 else given
    try:
        return bool(FIELDS["cancel"].parse(given, 0))
    except ValueError:
        return False


def _given_values(tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the client set, unparsed, by field name. A JSON null counts as not set."""
    own_parameters = {key: value for key, value in parameters.items() if not is_triton_parameter(key)}
    own_tensors = {name: _tensor_value(name, array) for name, array in tensors.items() if name != _TEXT}
    text = own_tensors.pop(_JSON, own_parameters.pop(_JSON, None))
    own_parameters.pop(_JSON, None)
    values: dict[str, Any] = {}
    for source in (own_parameters, _json_object(text), own_tensors):
        values |= _by_field(source)
    return values


def _by_field(source: Mapping[str, Any]) -> dict[str, Any]:
    """One source's values under the fields' own names."""
    keys: dict[str, str] = {}
    for key, value in source.items():
        name = ALIASES.get(key, key)
        if name not in FIELDS:
            raise RequestError(_unknown_field(key))
        if value is not None and name in keys:
            raise RequestError(f"'{keys[name]}' and '{key}' are the same field; allowed is one of them")
        if value is not None:
            keys[name] = key
    return {name: source[key] for name, key in keys.items()}


def _tensor_value(name: str, array: np.ndarray) -> Any:
    """The one element of a tensor of any shape as a Python value; for a list field, a list unless it holds one."""
    field = FIELDS.get(ALIASES.get(name, name))
    if array.size != 1 and not (field and field.is_list):
        raise RequestError(f"'{name}' has {array.size} elements; allowed is one")
    values = array.reshape(-1).tolist()
    if array.dtype == object:
        values = [_element(name, value) for value in values]
    return values[0] if len(values) == 1 else values


def _element(name: str, value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"'{name}' is not valid UTF-8 (byte {error.start}); allowed is UTF-8 text") from None


def _json_object(text: Any) -> dict[str, Any]:
    """What `sampling_parameters` says. Blank is the same as absent: clients that always send the tensor do that."""
    if text is None or (isinstance(text, str) and not text.strip()):
        return {}
    try:
        value = load_json(text) if isinstance(text, str) else None
    except ValueError as error:
        _refuse(_JSON, text, f"allowed is a JSON object ({error})")
    if not isinstance(value, dict):
        _refuse(_JSON, text, "allowed is a JSON object")
    return value


def _parse(field: Field, raw: Any, vocab_size: int) -> Any:
    try:
        return field.parse(raw, vocab_size)
    except Explained as error:
        _refuse(field.name, raw, f"{field.allowed(vocab_size)} ({error})")
    except ValueError:
        _refuse(field.name, raw, field.allowed(vocab_size))


def _sampling(values: Mapping[str, Any], output: OutputOptions, vocab_size: int) -> SamplingParams:
    """Sampling parameters in one spelling: greedy is temperature 0, the whole vocabulary is top_k 0."""
    own = _attributes(values, SamplingParams) | {"grammar": _grammar(values)}
    if own.get("min_tokens", 0) > own.get("max_tokens", own.get("min_tokens", 0)):
        _refuse("min_tokens", own["min_tokens"], f"allowed is at most max_tokens, which is {own['max_tokens']}")
    if values.get("best_of", 1) not in (1, n := own.get("n", 1)):
        _refuse("best_of", values["best_of"], f"allowed is as many as 'n', which is {n}")
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


def _grammar(values: Mapping[str, Any]) -> Grammar | None:
    """What the output must match, however it was said."""
    asked = {name: values[name] for name, field in FIELDS.items() if field.attribute == "grammar" and name in values}
    guide_type, guide = values.get("guided_decoding_guide_type"), values.get("guided_decoding_guide")
    if guide and not guide_type:
        raise RequestError("'guided_decoding_guide_type' is missing; allowed is what 'guided_decoding_guide' is")
    try:
        if guide_type:
            asked["guided_decoding_guide_type"] = guided(guide_type, guide)
    except ValueError as error:
        _refuse(
            "guided_decoding_guide", guide, f"allowed is what guided_decoding_guide_type {guide_type} says ({error})"
        )
    try:
        return the_one(asked)
    except ValueError as error:
        raise RequestError(str(error)) from None


def _output(values: Mapping[str, Any], settings: Settings) -> OutputOptions:
    """Output options. As in vllm_backend the prompt comes first unless the client streams or excludes it; a
    conversation does not."""
    own = {"stream_interval": settings.stream_interval} | _attributes(values, OutputOptions)
    stream = own.get("stream", False)
    exclude = values.get("exclude_input_in_output", stream or "messages" in values)
    if stream and not exclude:
        _refuse("exclude_input_in_output", False, "allowed is true when streaming")
    if own.get("output_ids") and values.get("n", 1) > 1:
        own["num_output_tokens"] = True  # which ids are whose
    return OutputOptions(**own, echo_prompt=not exclude)


def _attributes(values: Mapping[str, Any], noun: type) -> dict[str, Any]:
    return {FIELDS[name].attribute: value for name, value in values.items() if FIELDS[name].noun is noun}


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise RequestError(f"'{name}' is {_show(value)}; {allowed}")


def _show(value: Any) -> str:
    """The value as Python writes it, cut short however long or deep it is, and without what UTF-8 cannot hold."""
    shown = _repr.repr(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[: _MAX_SHOWN - 3]}..."


def _unknown_field(key: str) -> str:
    close = difflib.get_close_matches(key[:80], FIELDS, n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    allowed = ", ".join(name for name, field in FIELDS.items() if field.is_supported)
    return f"unknown field {_show(key)}{hint}; allowed are {allowed}"
