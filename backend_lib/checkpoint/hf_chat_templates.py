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
    own = _source(folder / "chat_template.jinja")
    own_tool_use = _source(folder / "additional_chat_templates" / f"{_TOOL_USE}.jinja")
    if own is None:
        named = _named(texts)
        if named.default is None:
            named = _named(Fields.from_json_if_there(folder / "chat_template.json"))
        # A template for tools that stands in a list belongs to the default beside it.
        own, own_tool_use = named.default, own_tool_use or named.tool_use
    return ChatTemplates(own, own_tool_use)


def _source(path: Path) -> str | None:
    return (read_text(path, MAX_JSON_BYTES) if is_there(path) else "") or None


def _named(fields: Fields) -> ChatTemplates:
    """One source, or several as an object or as a list of {name, template}."""
    template = fields.values.get(_KEY)
    if isinstance(template, list):
        template = dict(_pair(each) for each in template)
    if not isinstance(template, dict):
        return ChatTemplates(fields.text(_KEY, "") or None, None)
    default, tool_use = template.get("default"), template.get(_TOOL_USE)
    if not isinstance(default, str) or not isinstance(tool_use or "", str):
        raise fields.error(_KEY, "a string, or a list with one named 'default'")
    return ChatTemplates(default, tool_use)


def _pair(entry: Any) -> tuple[str, Any]:
    """What has no name counts under none."""
    name = entry.get("name") if isinstance(entry, dict) else None
    return (name, entry.get("template")) if isinstance(name, str) else ("", None)
