"""The chat templates of a Hugging Face folder, which has had four places for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from backend_lib.checkpoint.fields import MAX_JSON_BYTES, Fields
from backend_lib.checkpoint.untrusted import is_there, read_text

_KEY = "chat_template"
_TOOL_USE = "tool_use"


class ChatTemplates(NamedTuple):
    """Jinja sources. `tool_use` is for conversations with tools, where that is another one."""

    default: str | None
    tool_use: str | None


def read_chat_templates(folder: Path, texts: Fields) -> ChatTemplates:
    """`texts` is tokenizer_config.json. A file of its own comes before it, and that of old processors after it.

    Raises:
        ValueError: names the file and what in it is no template.
    """
    default, tool_use = _of_config(texts)
    own = _source(folder / "chat_template.jinja")
    own_tool_use = _source(folder / "additional_chat_templates" / f"{_TOOL_USE}.jinja")
    if own is None and default is None:
        default = Fields.from_json_if_there(folder / "chat_template.json").text(_KEY, "") or None
    # A template for tools that stands in the list belongs to the default beside it.
    return ChatTemplates(own or default, own_tool_use or (tool_use if own is None else None))


def _source(path: Path) -> str | None:
    return read_text(path, MAX_JSON_BYTES) if is_there(path) else None


def _of_config(texts: Fields) -> tuple[str | None, str | None]:
    template = texts.values.get(_KEY)
    if not isinstance(template, list):
        return texts.text(_KEY, "") or None, None
    named: dict[Any, Any] = {
        each["name"]: each.get("template")
        for each in template
        if isinstance(each, dict) and isinstance(each.get("name"), str)
    }
    if not isinstance(named.get("default"), str) or not isinstance(named.get(_TOOL_USE, ""), str):
        raise texts.error(_KEY, "a string, or a list with one named 'default'")
    return named["default"], named.get(_TOOL_USE)
