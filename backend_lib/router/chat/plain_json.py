"""JSON from a client: bounded in size and depth, and of nothing but JSON's own types."""

from __future__ import annotations

import json
import math
from typing import Any

from backend_lib.router.chat.errors import ChatError, refuse

# Rendering costs about as much as there is text; four million characters are a million tokens and more.
MAX_CHARS = 1 << 22
MAX_VALUES = 1 << 17
MAX_DEPTH = 32
_LARGEST_WHOLE = 1 << 64

_SCALARS = (str, int, float, bool, type(None))


def from_client(name: str, value: Any) -> Any:
    """What the client meant: JSON text is parsed; anything else is JSON already.

    Only types that JSON has are left, so a template finds no attribute or method that does more than look.

    Raises:
        ChatError: it is no JSON, too large, too deep, or holds what is no JSON value.
    """
    if isinstance(value, str):
        value = _parsed(name, value)
    _check(name, value)
    return value


def _parsed(name: str, text: str) -> Any:
    if len(text) > MAX_CHARS:
        raise ChatError(f"'{name}' has {len(text)} characters; allowed are at most {MAX_CHARS}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ChatError(f"'{name}' is nested too deep; allowed are {MAX_DEPTH} levels") from None
    except ValueError as error:  # a number too long is one, and no JSONDecodeError
        refuse(name, text, f"JSON ({error})")


def _check(name: str, value: Any) -> None:
    """Without recursion, for the depth is the client's."""
    values, chars, level = 0, 0, [value]
    for _ in range(MAX_DEPTH + 1):
        values += len(level)
        chars += sum(_size(name, each) for each in level)
        if values > MAX_VALUES or chars > MAX_CHARS:
            raise ChatError(
                f"'{name}' is too large; allowed are at most {MAX_CHARS} characters in {MAX_VALUES} JSON values"
            )
        level = [child for each in level if isinstance(each, list | dict) for child in _children(each)]
        if not level:
            return
    raise ChatError(f"'{name}' is nested too deep; allowed are {MAX_DEPTH} levels")


def _children(value: list[Any] | dict[str, Any]) -> list[Any]:
    return value if isinstance(value, list) else list(value.values())


def _size(name: str, value: Any) -> int:
    """Characters of one value, without what is inside it."""
    if type(value) is dict:
        if not all(type(key) is str for key in value):
            refuse(name, value, "objects whose keys are strings")
        return sum(map(len, value))
    if type(value) is str:
        return len(value)
    if type(value) is float and not math.isfinite(value):
        refuse(name, value, "finite numbers")
    if type(value) is int and not -_LARGEST_WHOLE <= value <= _LARGEST_WHOLE:
        refuse(name, value, "whole numbers of at most 64 bits")
    if type(value) is not list and type(value) not in _SCALARS:
        refuse(name, value, "what JSON can hold")
    return 1
