"""From a client's tensors and parameters to one `GenerationRequest`.

A field's value is its tensor, else what the JSON object `sampling_parameters` says, else the request parameter.
"""

from __future__ import annotations

import difflib
import logging
import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from backend_lib.checkpoint import Checkpoint
from backend_lib.config import Settings
from backend_lib.request import GenerationRequest, OutputOptions, SamplingParams
from backend_lib.router.fields import FIELDS, TIMEOUT, Field, is_triton_parameter, load_json

log = logging.getLogger("tandem")

_TEXT = "text_input"
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
    text = _prompt(tensors)
    given = {name: _parse(FIELDS[name], raw, vocab_size) for name, raw in _given_values(tensors, parameters).items()}
    values = {**defaults, **given}
    return GenerationRequest(
        request_id=request_id,
        text=text,
        sampling=_sampling(values, vocab_size),
        output=_output(values, settings),
        **_attributes(values, GenerationRequest),
        timeout_us=timeout_us or _parse(TIMEOUT, parameters.get(TIMEOUT.name, 0), vocab_size),
    )


def checkpoint_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the checkpoint says of sampling, parsed like a client's values. A field that is not supported is left out.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """
    values = {}
    try:
        for name, value in checkpoint.sampling.given().items():
            if FIELDS[name].is_supported:
                values[name] = _parse(FIELDS[name], value, checkpoint.config.vocab_size)
            elif value != FIELDS[name].low:
                log.warning("%s asks for %s %s, which is not supported and left out", checkpoint.name, name, value)
        return values
    except RequestError as error:
        raise ValueError(f"{checkpoint.name} asks for sampling that cannot be done: {error}") from None


def _prompt(tensors: Mapping[str, np.ndarray]) -> str:
    """The prompt. A NUL is a character like any other: tokenizers take it."""
    if _TEXT not in tensors:
        raise RequestError(f"'{_TEXT}' is missing; allowed is one string that is not empty")
    text = _tensor_value(_TEXT, tensors[_TEXT])
    if not isinstance(text, str) or not text:
        _refuse(_TEXT, text, "allowed is one string that is not empty")
    return text


def _given_values(tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the client set, unparsed, by field name. A JSON null counts as not set."""
    own_parameters = {key: value for key, value in parameters.items() if not is_triton_parameter(key)}
    own_tensors = {
        name: _tensor_value(name, array, is_list=name in FIELDS and FIELDS[name].is_list)
        for name, array in tensors.items()
        if name != _TEXT
    }
    text = own_tensors.pop(_JSON, own_parameters.pop(_JSON, None))
    own_parameters.pop(_JSON, None)
    values: dict[str, Any] = {}
    for source in (own_parameters, _json_object(text), own_tensors):
        values |= {key: value for key, value in source.items() if value is not None}
    unknown = next((key for key in values if key not in FIELDS), None)
    if unknown is not None:
        raise RequestError(_unknown_field(unknown))
    return values


def _tensor_value(name: str, array: np.ndarray, is_list: bool = False) -> Any:
    """The one element of a tensor of any shape as a Python value; for a list field, a list unless it holds one."""
    if array.size != 1 and not is_list:
        raise RequestError(f"'{name}' has {array.size} elements; allowed is one")
    values = [_element(name, value) for value in array.reshape(-1).tolist()]
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
    except ValueError:
        _refuse(field.name, raw, field.allowed(vocab_size))


def _sampling(values: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Sampling parameters in one spelling: greedy is temperature 0, the whole vocabulary is top_k 0."""
    own = _attributes(values, SamplingParams)
    if own.get("min_tokens", 0) > own.get("max_tokens", own.get("min_tokens", 0)):
        _refuse("min_tokens", own["min_tokens"], f"allowed is at most max_tokens, which is {own['max_tokens']}")
    if own.get("temperature", 1.0) < _GREEDY_BELOW:
        own["temperature"] = 0.0
    own["top_p"] = max(own.get("top_p", 1.0), _LEAST_TOP_P)
    if not 0 < own.get("top_k", 0) < vocab_size:
        own["top_k"] = 0
    if "seed" in own:
        own["seed"] = None if own["seed"] == -1 else own["seed"] % (1 << 64)
    return SamplingParams(**own)


def _output(values: Mapping[str, Any], settings: Settings) -> OutputOptions:
    """Output options. As in vllm_backend the prompt comes first unless the client streams or excludes it."""
    own = {"stream_interval": settings.stream_interval} | _attributes(values, OutputOptions)
    stream = own.get("stream", False)
    exclude = values.get("exclude_input_in_output", stream)
    if stream and not exclude:
        _refuse("exclude_input_in_output", False, "allowed is true when streaming")
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
