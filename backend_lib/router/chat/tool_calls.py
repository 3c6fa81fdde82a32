"""The formats in which models call tools, by name."""

from __future__ import annotations

import re

from backend_lib.router.chat.call_reader import CallReader, Flag, Step
from backend_lib.router.chat.calls import Call, call_of, load_call, load_object, make_call

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_ID = re.compile(r"[A-Za-z0-9]*")


class Hermes(CallReader):
    """Hermes, Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one element for each call."""

    marker = "<tool_call>"
    markers = (marker, "</tool_call>")

    def _call(self) -> Flag:
        yield from self._spaces()
        text = yield from self._json("{")
        call = load_call(text, ("arguments", "parameters"))
        if call is None:
            return False
        yield from self._spaces()
        if not (yield from self._closing("</tool_call>")):
            return False
        self._give_calls(call)
        return True


class Llama3(CallReader):
    """Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, several with `;` between them.

    They stand at the beginning of the reply or after `<|python_tag|>`. Without the tag an object must have a name and
    parameters and nothing else, or it is an answer in JSON.
    """

    marker = "<|python_tag|>"
    markers = (marker,)

    def _opening(self) -> Step:
        yield from self._spaces()
        if (yield from self._next()) == "{" and not (yield from self._calls(required=True)):
            self._give_content()

    def _call(self) -> Flag:
        yield from self._spaces()
        return (yield from self._calls(required=False))

    def _calls(self, required: bool) -> Flag:
        if not (yield from self._one(required)):
            return False
        while (yield from self._separator()):
            if not (yield from self._one(required)):
                self._give_content()
                break
        return True

    def _one(self, required: bool) -> Flag:
        text = yield from self._json("{")
        call = load_call(text, ("parameters", "arguments"), required)
        if call is not None:
            self._give_calls(call)
        return call is not None

    def _separator(self) -> Flag:
        yield from self._spaces()
        there = yield from self._literal(";")
        if there:
            yield from self._spaces()
        return there


class Mistral(CallReader):
    """Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name{...}` for each call.

    In the second spelling `[CALL_ID]` with the call's id, and `[ARGS]`, may stand before the arguments.
    """

    marker = "[TOOL_CALLS]"
    markers = (marker, "[CALL_ID]", "[ARGS]")

    def _call(self) -> Flag:
        yield from self._spaces()
        is_list = (yield from self._next()) == "["
        return (yield from self._list() if is_list else self._named())

    def _list(self) -> Flag:
        text = yield from self._json("[")
        values = load_object(text) or []
        calls = [call for value in values if (call := call_of(value, ("arguments", "parameters"))) is not None]
        if not calls or len(calls) < len(values):
            return False
        self._give_calls(*calls)
        return True

    def _named(self) -> Flag:
        name = yield from self._word(_NAME)
        call_id = (yield from self._word(_ID)) if (yield from self._literal("[CALL_ID]")) else ""
        yield from self._literal("[ARGS]")
        yield from self._spaces()
        text = yield from self._json("{")
        call = make_call(name, load_object(text)) if text else None
        if call is None:
            return False
        self._give_calls(Call(call.name, call.arguments, call_id))
        return True


TOOL_PARSERS: dict[str, type[CallReader]] = {"hermes": Hermes, "llama3": Llama3, "mistral": Mistral}


def detect_tool_parser(template: str) -> str:
    """The name of the format that a chat template teaches; "none" where it teaches none that is known."""
    if Mistral.marker in template:
        return "mistral"
    if Hermes.marker in template:  # with `<function=` inside it is another format, which is no JSON
        return "none" if "<function=" in template else "hermes"
    is_llama3 = "<|start_header_id|>" in template and "ipython" in template
    return "llama3" if is_llama3 or Llama3.marker in template else "none"
