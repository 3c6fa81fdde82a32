"""The spellings in which clients ask for output of a certain form; each becomes a `Grammar`, or None for any text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from backend_lib.request import Grammar, GrammarKind
from backend_lib.router.kinds import (
    Explained,
    Kind,
    dump_json,
    nothing,
    read_object,
    read_strings,
    read_text,
    read_truth,
)

MAX_SOURCE_BYTES = 1 << 16


def _grammar(kind: GrammarKind, source: str) -> Grammar:
    size = len(source.encode())
    if not source:
        raise Explained("it is empty")
    if size > MAX_SOURCE_BYTES:
        raise Explained(f"it has {size} bytes")
    return Grammar(kind=kind, source=source)


def read_schema(raw: Any) -> Grammar:
    return _grammar(GrammarKind.JSON_SCHEMA, dump_json(read_object(raw)))


def read_regex(raw: Any) -> Grammar:
    return _grammar(GrammarKind.REGEX, read_text(raw))


def read_ebnf(raw: Any) -> Grammar:
    return _grammar(GrammarKind.EBNF, read_text(raw))


def read_choices(raw: Any) -> Grammar:
    """A client that gives choices as text gives a JSON list; text that does not begin like one is the only choice."""
    choices = read_strings(raw, "[")
    if not choices or not all(choices):
        raise Explained("there is none, or an empty one")
    return _grammar(GrammarKind.CHOICE, dump_json(choices))


def read_json_object(raw: Any) -> Grammar | None:
    return Grammar(kind=GrammarKind.JSON_OBJECT) if read_truth(raw) else None


_STRUCTURES: dict[str, Callable[[Any], Grammar | None]] = {
    "json": read_schema,
    "regex": read_regex,
    "choice": read_choices,
    "grammar": read_ebnf,
    "json_object": read_json_object,
}


# Members that say how vLLM is to do it. None of it is done here, and true would want it.
_SWITCHES = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties")


def read_structure(raw: Any) -> Grammar | None:
    """vLLM's `structured_outputs`, once `guided_decoding`: an object of which one member says the form."""
    value = {key: each for key, each in read_object(raw).items() if each is not None}
    for switch in _SWITCHES:
        if read_truth(value.pop(switch, False)):
            raise Explained(f"{switch} is only supported at false")
    if "whitespace_pattern" in value:
        raise Explained("whitespace_pattern is only supported at null")
    unknown = next((key for key in value if key not in _STRUCTURES), None)
    if unknown is not None:
        raise Explained(f"unknown key {unknown[:80]!a}")
    found = {key: grammar for key, each in value.items() if (grammar := _STRUCTURES[key](each))}
    if len(found) > 1:
        raise Explained(f"{' and '.join(found)} exclude each other")
    return next(iter(found.values()), None)


def read_response_format(raw: Any) -> Grammar | None:
    """OpenAI's `response_format`."""
    value = read_object(raw)
    if value.get("type") == "text":
        return None
    if value.get("type") == "json_object":
        return Grammar(kind=GrammarKind.JSON_OBJECT)
    if value.get("type") != "json_schema":
        raise Explained("type is none of text, json_object, json_schema")
    wrapped = value.get("json_schema")
    if not isinstance(wrapped, dict) or "schema" not in wrapped:
        raise Explained("json_schema has no schema")
    return read_schema(wrapped["schema"])


_GUIDES: dict[str, Callable[[Any], Grammar]] = {
    "json_schema": read_schema,
    "regex": read_regex,
    "ebnf_grammar": read_ebnf,
}
GUIDE_TYPES = ("json", *_GUIDES)


def read_guide_type(raw: Any) -> str:
    if raw not in GUIDE_TYPES:
        raise ValueError("none of them")
    return str(raw)


def guided(guide_type: str, guide: str | None) -> Grammar:
    """tensorrtllm_backend's pair of fields. Raises ValueError saying what is wrong with the guide."""
    if guide_type == "json":
        if guide:
            raise Explained("guided_decoding_guide_type json takes none")
        return Grammar(kind=GrammarKind.JSON_OBJECT)
    return _GUIDES[guide_type](guide)


def the_one(grammars: Mapping[str, Grammar | None]) -> Grammar | None:
    """The one grammar of those that fields ask for, with its field. Raises ValueError naming two of them."""
    asked = {name: grammar for name, grammar in grammars.items() if grammar}
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise ValueError(f"'{first}' and '{second}' both say what the output must match; allowed is one of them")
    return next((replace(grammar, field=name) for name, grammar in asked.items()), None)


def _kind(name: str, words: str, read: Callable[[Any], Any]) -> Kind:
    return Kind(name, f"{words} of at most {MAX_SOURCE_BYTES} bytes", read, nothing)


SCHEMA = _kind("object", "a JSON schema, as an object or as text,", read_schema)
REGEX = _kind("string", "a regular expression", read_regex)
EBNF = _kind("string", "a grammar in EBNF", read_ebnf)
CHOICES = _kind("strings", "a list of strings that are not empty,", read_choices)
JSON_OBJECT = Kind("boolean", "true or false", read_json_object, nothing)
STRUCTURE = _kind("object", f"a JSON object with one of {', '.join(_STRUCTURES)},", read_structure)
RESPONSE_FORMAT = _kind(
    "object", 'a JSON object whose "type" is text, json_object, or json_schema with a schema', read_response_format
)
GUIDE_TYPE = Kind("string", f"one of {', '.join(GUIDE_TYPES)}", read_guide_type, nothing)
GUIDE = Kind("string", "what guided_decoding_guide_type says: a schema, an expression or a grammar", read_text, nothing)
