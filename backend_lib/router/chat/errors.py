"""What is wrong with a conversation, in words for its client."""

from __future__ import annotations

from typing import Any, NoReturn

from backend_lib.checkpoint.untrusted import shown


class ChatError(ValueError):
    """The client's mistake: the field, its value and what is allowed."""


def refuse(path: str, value: Any, allowed: str) -> NoReturn:
    """`path` names the field, as in `messages[2].content`. A value of None counts as missing."""
    if value is None:
        raise ChatError(f"'{path}' is missing; allowed is {allowed}")
    raise ChatError(f"'{path}' is {shown(value)}; allowed is {allowed}")
