"""Where a request's fields stand: tensors, the JSON object `sampling_parameters`, and request parameters."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from backend_lib.router.fields import ALIASES, FIELDS, is_triton_parameter
from backend_lib.router.kinds import load_json
from backend_lib.router.refusals import RequestError, refuse, shown
from backend_lib.router.tensors import STOP, TRTLLM

TEXT = "text_input"
_JSON = "sampling_parameters"


class Raw(NamedTuple):
    """A value as the client sent it, and under which of its field's names."""

    called: str
    value: Any


def given_values(tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any]) -> dict[str, Raw]:
    """What the client set, unparsed, by field name. A JSON null counts as not set."""
    own_parameters = {key: value for key, value in parameters.items() if not is_triton_parameter(key)}
    own_tensors = {name: tensor_value(name, array) for name, array in tensors.items() if name != TEXT}
    text = own_tensors.pop(_JSON, own_parameters.pop(_JSON, None))
    own_parameters.pop(_JSON, None)
    values: dict[str, Raw] = {}
    for source in (own_parameters, _json_object(text), own_tensors):
        values |= _by_field(source)
    return values


def _by_field(source: Mapping[str, Any]) -> dict[str, Raw]:
    """One source's values under the fields' own names."""
    found: dict[str, Raw] = {}
    for key, value in source.items():
        name = ALIASES.get(key, key)
        if name not in FIELDS:
            raise RequestError(_unknown_field(key))
        if value is not None and name in found:
            raise RequestError(f"'{found[name].called}' and '{key}' are the same field; allowed is one of them")
        if value is not None:
            found[name] = Raw(key, value)
    return found


def tensor_value(name: str, array: np.ndarray) -> Any:
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
        refuse(_JSON, text, f"allowed is a JSON object ({error})")
    if not isinstance(value, dict):
        refuse(_JSON, text, "allowed is a JSON object")
    return value


def _unknown_field(key: str) -> str:
    close = difflib.get_close_matches(key[:80], FIELDS, n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    allowed = ", ".join(name for name, field in FIELDS.items() if field.is_supported)
    return f"unknown field {shown(key)}{hint}; allowed are {allowed}"


def is_cancellation(tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any], contract: str) -> bool:
    """Whether the request is an order to end others. One that cannot be understood is left to `parse_request`."""
    given = parameters.get("cancel", False)
    for name in ("cancel", STOP) if contract == TRTLLM else ("cancel",):
        given = tensors[name].reshape(-1).tolist() if name in tensors else given
    given = given[0] if isinstance(given, list) and len(given) == 1 else given
    try:
        return bool(FIELDS["cancel"].parse(given, 0))
    except ValueError:
        return False
