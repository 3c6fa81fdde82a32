"""Jinja as chat templates expect it: what Hugging Face's transformers gives them, in the same sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(TemplateError):
    """The template itself says that these messages are not for it."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training. Here it is as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, as in transformers, where the block is a call: what is set inside is not seen outside.
        return nodes.Scope(body).set_lineno(line)


def make_environment() -> ImmutableSandboxedEnvironment:
    """Messages are hostile: the sandbox keeps them from Python's insides, and what is given to a template unchanged."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes what HTML would misread, which a model never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
