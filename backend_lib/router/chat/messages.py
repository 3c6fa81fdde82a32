"""Messages and tools as clients write them (the shape is OpenAI's), checked and in the spelling that templates read."""

from __future__ import annotations

import re
from typing import Any

from backend_lib.router.chat.errors import ChatError, refuse
from backend_lib.router.chat.plain_json import from_client

MAX_MESSAGES = 4096
MAX_TOOLS = 256
MAX_PARTS = 256

# Templates write a role between control tokens: it must not be able to end them.
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_STRINGS = ("name", "tool_call_id", *_REASONING)
_FIELDS = ("role", "content", "tool_calls", *_STRINGS)
_CONTENT = 'a string or a list of {"type": "text", "text": a string}'
_ARGUMENTS = "a JSON object, or the text of one"


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """A conversation from a list, or from the JSON text of one; what was given is not changed.

    Fields that are null are left out, which is what templates look for. The arguments of a tool call, which OpenAI
    writes as JSON text, become the object. Reasoning is there under each name that templates know.

    Raises:
        ChatError: names the message by its index, the field, its value and what is allowed.
    """
    messages = from_client("messages", value)
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        refuse("messages", messages, "a list of at least one message, each a JSON object")
    if len(messages) > MAX_MESSAGES:
        raise ChatError(f"'messages' has {len(messages)} messages; allowed are at most {MAX_MESSAGES}")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """Tools from a list, or from the JSON text of one; None when there are none.

    Raises:
        ChatError: names the tool by its index, the field, its value and what is allowed.
    """
    tools = from_client("tools", value)
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        refuse("tools", tools, f"a list of at most {MAX_TOOLS} tools")
    for index, tool in enumerate(tools):
        _check_tool(f"tools[{index}]", tool)
    return tools


def joined_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with each content one string: its parts, with a newline between them as in vLLM."""
    return [
        message | {"content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _message(path: str, message: dict[str, Any]) -> dict[str, Any]:
    # Clients send back what they were given, with fields of OpenAI's that are null or empty.
    given = {key: value for key, value in message.items() if value is not None and (key in _FIELDS or value != [])}
    for key in given:
        if key not in _FIELDS:
            raise ChatError(f"'{path}' has the unknown field {key[:80]!r}; allowed are {', '.join(_FIELDS)}")
    role = given.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        refuse(f"{path}.role", role, "a name of letters, digits, '_' and '-', such as user")
    for key in _STRINGS:
        if not isinstance(given.get(key, ""), str):
            refuse(f"{path}.{key}", given[key], "a string")
    given |= _tool_calls(f"{path}.tool_calls", given)
    _check_content(f"{path}.content", given)
    return _with_reasoning(given)


def _check_content(path: str, message: dict[str, Any]) -> None:
    """A call of tools may stand alone; any other message says something, were it an empty string."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        refuse(path, content, _CONTENT)
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            refuse(f"{path}[{index}]", part, '{"type": "text", "text": a string}; the model reads nothing but text')


def _tool_calls(path: str, message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if calls is None:
        return {}
    if not isinstance(calls, list):
        refuse(path, calls, "a list of tool calls")
    return {"tool_calls": [_tool_call(f"{path}[{index}]", call) for index, call in enumerate(calls)]}


def _tool_call(path: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, dict) or call.get("type", "function") != "function":
        refuse(path, call, '{"id", "type": "function", "function": {"name", "arguments"}}')
    if not isinstance(call.get("id", ""), str):
        refuse(f"{path}.id", call["id"], "a string")
    function = call.get("function")
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        refuse(f"{path}.function", function, '{"name", "arguments"} with a name that is not empty')
    arguments = _arguments(f"{path}.function.arguments", function.get("arguments"))
    return call | {"function": function | {"arguments": arguments}}


def _arguments(path: str, given: Any) -> dict[str, Any]:
    """No arguments are written as an empty object, null or an empty string."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        arguments = from_client(path, given)
    except ChatError:
        refuse(path, given, _ARGUMENTS)
    if not isinstance(arguments, dict):
        refuse(path, given, _ARGUMENTS)
    return arguments


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """As transformers has it: older names stand for the first, and one template family reads `thinking`."""
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _check_tool(path: str, tool: Any) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        refuse(path, tool, '{"type": "function", "function": {"name", "description", "parameters"}}')
    function = tool.get("function")
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        refuse(f"{path}.function", function, '{"name", "description", "parameters"} with a name that is not empty')
    if not isinstance(function.get("description") or "", str):
        refuse(f"{path}.function.description", function["description"], "a string")
    if not isinstance(function.get("parameters") or {}, dict):
        refuse(f"{path}.function.parameters", function["parameters"], "a JSON schema, which is an object")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)
