"""Conversations: messages to a prompt by the checkpoint's template, and a reply to content, reasoning and tool calls.

Pure text: nothing here knows tensors, slots or Triton. The prompt that `ChatTemplate.render` gives is to be tokenised
without adding special tokens, for the template has written them.
"""

from backend_lib.router.chat.errors import ChatError
from backend_lib.router.chat.reply_parser import (
    REASONING_PARSER_NAMES,
    TOOL_PARSER_NAMES,
    Delta,
    ReplyFormat,
    ReplyParser,
)
from backend_lib.router.chat.template import ChatTemplate, parse_template_kwargs

__all__ = [
    "REASONING_PARSER_NAMES",
    "TOOL_PARSER_NAMES",
    "ChatError",
    "ChatTemplate",
    "Delta",
    "ReplyFormat",
    "ReplyParser",
    "parse_template_kwargs",
]
