"""A checkpoint's chat template: from a conversation to the prompt's text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import Template, TemplateError

from backend_lib.checkpoint.untrusted import shown
from backend_lib.router.chat.environment import TemplateRefusal, make_environment
from backend_lib.router.chat.errors import ChatError, refuse
from backend_lib.router.chat.messages import joined_parts, parse_messages, parse_tools
from backend_lib.router.chat.plain_json import from_client

if TYPE_CHECKING:
    from backend_lib.checkpoint import Checkpoint

log = logging.getLogger("tandem")

# A template may write the tools, or all that came before, once for each message.
MAX_PROMPT_CHARS = 1 << 24

_SHOWN = 500  # characters of a template's complaint
_OWN = ("messages", "tools", "add_generation_prompt")
_PROBE = "Hello"


def parse_template_kwargs(value: Any) -> dict[str, Any]:
    """Further variables of a template, such as {"enable_thinking": false}, from an object or the JSON text of one.

    Raises:
        ChatError: it is none, or a name is one that `render` has an argument for.
    """
    variables = from_client("chat_template_kwargs", value)
    if variables is None:
        return {}
    if not isinstance(variables, dict) or not all(key.isidentifier() and key not in _OWN for key in variables):
        refuse("chat_template_kwargs", variables, f"a JSON object whose keys are names, but not {', '.join(_OWN)}")
    return variables


class ChatTemplate:
    """Renders conversations. Threads may share it.

    The template is the operator's, as the weights are: it is a program without a bound of its own. The messages are
    anybody's: what they hold is bounded in size and depth, and so is the prompt.
    """

    def __init__(self, source: str | None, *, tool_source: str | None = None, variables: Mapping[str, Any]) -> None:
        """`tool_source` is for requests with tools; None is the same as `source`."""
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._variables = {"documents": None, **variables}
        self._plain = _Compiled(source, self._variables)
        self._with_tools = self._plain if tool_source is None else _Compiled(tool_source, self._variables)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ChatTemplate:
        """Never fails: what is wrong with the template is logged, and said to those who use it."""
        template = cls(
            checkpoint.chat_template,
            tool_source=checkpoint.tool_template,
            variables={"bos_token": checkpoint.bos_token, "eos_token": checkpoint.eos_token},
        )
        if template.fault:
            log.warning("%s: %s; requests with 'messages' are refused", checkpoint.name, template.fault)
        return template

    @property
    def fault(self) -> str:
        """Why it cannot be used, or "". That there is none at all is no fault."""
        return self._plain.fault or self._with_tools.fault

    def render(self, messages: Any, /, *, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt, with the special tokens that belong to it: encode it without adding any.

        `messages` and `tools` are lists, or the JSON text of lists. What a message says is not escaped: like
        everywhere, a message that spells a control token has written that token.

        Raises:
            ChatError: they are not what is allowed, or the template cannot or will not render them.
        """
        conversation, known_tools = parse_messages(messages), parse_tools(tools)
        template = self._with_tools if known_tools else self._plain
        return template.render(
            conversation, tools=known_tools, add_generation_prompt=add_generation_prompt, **self._variables | kwargs
        )


class _Compiled:
    def __init__(self, source: str | None, variables: Mapping[str, Any]) -> None:
        self.fault = ""
        self._template = self._compile(source) if source else None
        self._takes_parts = self._template is not None and self._renders_parts(variables)

    def render(self, messages: list[dict[str, Any]], /, **variables: Any) -> str:
        if self._template is None:
            raise ChatError(f"{self.fault or 'this model has no chat template'}; give the whole prompt as 'text_input'")
        if not self._takes_parts:
            messages = joined_parts(messages)
        try:
            return _rendered(self._template, variables | {"messages": messages})
        except ChatError:
            if all("content" in message for message in messages):
                raise
        # A call of tools may come without content, which many a template reads all the same.
        return _rendered(self._template, variables | {"messages": [{"content": ""} | each for each in messages]})

    def _compile(self, source: str) -> Template | None:
        """Whatever a template makes Jinja, or Python's own compiler behind it, raise is a fault of the template."""
        try:
            return make_environment().from_string(source)
        except Exception as error:
            self.fault = f"the model's chat template cannot be compiled ({_words(error)})"
            return None

    def _renders_parts(self, variables: Mapping[str, Any]) -> bool:
        """Whether a list of text parts comes out as the text does; most templates know only strings."""
        parts = [{"type": "text", "text": _PROBE}]
        contents: tuple[Any, Any] = (_PROBE, parts)
        plain = {"tools": None, "add_generation_prompt": False, **variables}
        assert self._template is not None
        try:
            texts = [
                _rendered(self._template, plain | {"messages": [{"role": "user", "content": content}]})
                for content in contents
            ]
        except ChatError:
            return False
        return texts[0] == texts[1] and _PROBE in texts[0]


def _rendered(template: Template, variables: dict[str, Any]) -> str:
    pieces, length = [], 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > MAX_PROMPT_CHARS:
                raise ChatError(f"'messages' make a prompt of more than {MAX_PROMPT_CHARS} characters")
        text = "".join(pieces)
        text.encode()  # half a character, which JSON can spell, is in no tokenizer
        return text
    except ChatError:
        raise
    except UnicodeEncodeError as error:
        raise ChatError(
            f"'messages' hold text that is not valid Unicode ({shown(error.object[error.start])})"
        ) from None
    except TemplateRefusal as error:
        raise ChatError(f"'messages' are refused by the model's chat template: {_words(error)}") from None
    except Exception as error:  # a template is a program: it may add a number to a string, or look where nothing is
        raise ChatError(f"'messages' cannot be rendered by the model's chat template: {_words(error)}") from None


def _words(error: Exception) -> str:
    """What it says, which may quote a message: cut short, and without what UTF-8 cannot hold."""
    text = str(error.message) if isinstance(error, TemplateError) else str(error)
    return text[:_SHOWN].encode(errors="backslashreplace").decode() or type(error).__name__
