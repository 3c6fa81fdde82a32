"""What a client is told of a mistake."""

from __future__ import annotations

import reprlib
from typing import Any, NoReturn

_MAX_SHOWN = 80
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxlong = _MAX_SHOWN


class RequestError(ValueError):
    """The client's mistake, in words for the client: the field, its value and what is allowed."""


def refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise RequestError(f"'{name}' is {shown(value)}; {allowed}")


def shown(value: Any) -> str:
    """The value as Python writes it, cut short however long or deep it is, and without what UTF-8 cannot hold."""
    text = _repr.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
