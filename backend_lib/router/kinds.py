"""The kinds of values that clients send: how each is read, how it is measured, and what an error says of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

# More than all fields at their longest need. Python parses JSON without letting other threads run.
_MAX_JSON_CHARS = 1 << 20

# Longer than any number that fits a field, shorter than what Python refuses to convert.
_MAX_NUMBER_CHARS = 64
MAX_BIAS = 100.0
_WHOLE = re.compile(r"[+-]?[0-9]+")
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class Explained(ValueError):
    """What is wrong with a value, where saying what is allowed does not tell."""


def load_json(text: str) -> Any:
    """Parse JSON from a client. Raises ValueError, also for what nests too deep or is too long."""
    if len(text) > _MAX_JSON_CHARS:
        raise ValueError(f"more than {_MAX_JSON_CHARS} characters")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        raise ValueError("a number too long") from None


def dump_json(value: Any) -> str:
    """JSON, strictly and in ASCII. Raises ValueError for what JSON cannot spell or nests too deep."""
    try:
        return json.dumps(value, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deep") from None


def read_integer(raw: Any) -> int:
    """A whole number from 128, 128.0, "128" or "128.0". A boolean is a mistake, not a number."""
    if isinstance(raw, str) and _WHOLE.fullmatch(raw.strip()) and len(raw) <= _MAX_NUMBER_CHARS:
        return int(raw)
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    value = read_number(raw)
    if not value.is_integer():
        raise ValueError("not a whole number")
    return int(value)


def read_number(raw: Any) -> float:
    """A finite number from 0.7, 1, or "0.7"."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError("not a number")
    if isinstance(raw, str) and ("_" in raw or not raw.isascii()):
        raise ValueError("a number in Python's spelling, not in JSON's")
    try:
        value = float(raw)
    except OverflowError:
        raise ValueError("too large") from None
    if not math.isfinite(value):
        raise ValueError("not finite")
    return value


def read_truth(raw: Any) -> bool:
    """A boolean from true, 1, or "true" and "1" in any case."""
    # Any other type is not written out: a list may be nested too deep or too long for that.
    text = str(raw).strip().lower() if isinstance(raw, bool | int | str) else ""
    if text not in _TRUTH:
        raise ValueError("not a boolean")
    return _TRUTH[text]


def read_text(raw: Any) -> str:
    if not isinstance(raw, str):
        raise ValueError("not a string")
    raw.encode()  # a lone surrogate, which JSON can spell, raises UnicodeEncodeError (a ValueError)
    return raw


def read_strings(raw: Any, opening: str = '["') -> tuple[str, ...]:
    """Strings from a list, or from one string, which is itself the only one unless it is a JSON list of strings.

    Args:
        opening: what text begins with that means to be such a list; if it is none, that is a mistake.
    """
    if isinstance(raw, str):
        raw = _json_strings(raw, opening)
    if not isinstance(raw, list):
        raise ValueError("not strings")
    return tuple(read_text(item) for item in raw)


def _json_strings(text: str, opening: str) -> list[str]:
    """The generate endpoint refuses lists as parameters, so clients send them as JSON text."""
    try:
        value = load_json(text) if text.lstrip().startswith("[") else None
    except ValueError:
        value = None
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    if "".join(text.split()).startswith(opening):
        raise Explained("it begins like a JSON list of strings, and is none")
    return [text]


def read_texts(raw: Any) -> tuple[str, ...]:
    """Strings, of which empty ones are nothing: clients of tensorrtllm_backend send "", [""] and [[""]] for none."""
    if isinstance(raw, list) and len(raw) == 1 and isinstance(raw[0], list):
        raw = raw[0]  # its batch dimension
    return tuple(filter(None, read_strings(raw)))


def read_null(raw: Any) -> None:
    """Null itself counts as not given, and is never read."""
    raise ValueError("not null")


def read_integers(raw: Any) -> tuple[int, ...]:
    """Whole numbers from a list, a JSON list as text, or a number alone."""
    if isinstance(raw, str) and raw.lstrip().startswith("["):
        raw = load_json(raw)
    if not isinstance(raw, list):
        raw = [raw]
    # Of prompts there may be a hundred thousand.
    return tuple(raw) if set(map(type, raw)) == {int} else tuple(read_integer(item) for item in raw)


def read_object(raw: Any) -> dict[str, Any]:
    """A JSON object, or the text of one."""
    value = load_json(raw) if isinstance(raw, str) else raw
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _clamped(bias: float) -> float:
    return min(max(bias, -MAX_BIAS), MAX_BIAS)


def read_bias(raw: Any) -> tuple[tuple[int, float], ...]:
    """(token id, bias) from an object, whose keys are numbers as text. Two spellings of an id are one too many.

    What is beyond the bounds is the bound, as in vLLM.
    """
    pairs = tuple((read_integer(key), _clamped(read_number(value))) for key, value in read_object(raw).items())
    if len({token_id for token_id, _ in pairs}) != len(pairs):
        raise ValueError("a token twice")
    return pairs


def read_tool_choice(raw: Any) -> str:
    if raw not in ("auto", "none"):
        raise ValueError("neither")
    return str(raw)


def read_count(raw: Any) -> int | None:
    """A number of alternatives; false is off, true is none of them. A number as text is a number, never a truth."""
    if isinstance(raw, bool) or (isinstance(raw, str) and raw.strip().lower() in ("true", "false")):
        return 0 if read_truth(raw) else None
    return read_integer(raw)


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        name: in the table of fields.
        words: what an error says is allowed; `{span}` is a field's bounds, `{most}` the upper one, `{count}` how
            many, `{last}` the last id.
        read: turns a client's value into ours. Raises ValueError.
        measures: the numbers of a value that must lie in the field's bounds.
        token_ids: those of its numbers that must be in the vocabulary.
        is_list: how many there are is limited, and a tensor may have any number of elements.
    """

    name: str
    words: str
    read: Callable[[Any], Any]
    measures: Callable[[Any], Iterable[float]] = lambda value: (value,)
    token_ids: Callable[[Any], Iterable[int]] = lambda value: ()
    is_list: bool = False


def _ends(numbers: Iterable[int]) -> Iterable[int]:
    """The least and the largest, which stand for all."""
    numbers = tuple(numbers)
    return (min(numbers), max(numbers)) if numbers else ()


def nothing(value: Any) -> tuple[()]:
    return ()


INTEGER = Kind("integer", "a whole number {span}", read_integer)
NUMBER = Kind("number", "a number {span}", read_number)
TRUTH = Kind("boolean", "true or false", read_truth)
TEXT = Kind("string", "a string {span} characters long", read_text, lambda value: (len(value),))
STRINGS = Kind(
    "strings",
    "a string or a list of at most {count} strings, each {span} characters long",
    read_strings,
    lambda value: map(len, value),
    is_list=True,
)
TEXTS = replace(
    STRINGS,
    words="a string or a list of at most {count} strings, each at most {most} characters long",
    read=read_texts,
)
CHOICE = Kind("string", "auto or none", read_tool_choice, nothing)
NULL = Kind("null", "null", read_null)
JSON = Kind("JSON", "JSON, or the text of it", lambda raw: raw, nothing)
TOKEN_IDS = Kind(
    "integers",
    "a list of at most {count} whole numbers, each from 0 to {last}",
    read_integers,
    nothing,
    _ends,
    is_list=True,
)
BIAS = Kind(
    "object",
    "a JSON object of at most {count} token ids from 0 to {last}, each with a number, cut to lie {span}",
    read_bias,
    lambda value: (bias for _, bias in value),
    lambda value: _ends(token_id for token_id, _ in value),
)
COUNT = Kind(
    "integer or boolean",
    "a whole number {span}, or true or false",
    read_count,
    lambda value: () if value is None else (value,),
)
