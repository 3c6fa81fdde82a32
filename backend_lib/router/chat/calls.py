"""Calls of tools as a model wrote them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Call(NamedTuple):
    """`arguments` is the text of a JSON object. `id` is the one that the model gave it, if it did."""

    name: str
    arguments: str
    id: str = ""


class Piece(NamedTuple):
    """A part of a reply: `content` to show, or calls, or blanks beside a call that belong to neither.

    `raw` is what the model wrote; those of all pieces make up the reply.
    """

    raw: str
    content: str = ""
    calls: tuple[Call, ...] = ()


def load_call(text: str, arguments_keys: tuple[str, ...], required: bool = False) -> Call | None:
    """A call from the text of a JSON object, or None. `required`: it must have arguments and no other keys."""
    return call_of(load_object(text), arguments_keys, required)


def call_of(value: Any, arguments_keys: tuple[str, ...], required: bool = False) -> Call | None:
    if not isinstance(value, dict):
        return None
    key = next((key for key in arguments_keys if key in value), None)
    if required and (key is None or value.keys() - {"name", "type", key}):
        return None
    return make_call(value.get("name"), {} if key is None else value[key])


def make_call(name: Any, arguments: Any) -> Call | None:
    """Arguments may be an object, its JSON text, or null for none."""
    if isinstance(arguments, str):
        arguments = load_object(arguments)
    elif arguments is None:
        arguments = {}
    if not isinstance(name, str) or not name or not isinstance(arguments, Mapping):
        return None
    text = _written(arguments)
    return Call(name, text) if text is not None and _is_unicode(name) else None


def load_object(text: str) -> Any:
    """None when it is no JSON; control characters in strings are let through."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _written(arguments: Mapping[str, Any]) -> str | None:
    """JSON text that UTF-8 can hold; None for what JSON cannot (a number beyond all floats)."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return text if _is_unicode(text) else json.dumps(arguments)
    except ValueError:
        return None


def _is_unicode(text: str) -> bool:
    """Half a character, which JSON can spell, is in no UTF-8."""
    try:
        text.encode()
        return True
    except UnicodeEncodeError:
        return False
