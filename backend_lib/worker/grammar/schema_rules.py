"""JSON schemas of which every word is kept to, or that are refused by the word that is not.

xgrammar passes over what it does not know, so that an output may break the schema that it was asked to match. A schema
goes through only in the forms that xgrammar enforces: what holds for one type beside that type, and a reference, a
choice of schemas or a list of values alone. Words that say nothing about validity, and unknown ones, are left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from backend_lib.worker.grammar.regex_rules import json_pattern

_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
_TYPED = set().union(*_OF_TYPE.values())
_VALUES = ("const", "enum")
_ALONE = ("$ref", "anyOf", "oneOf", "allOf")
_NEVER = {
    "$dynamicRef", "$recursiveRef", "additionalItems", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "if", "maxContains", "minContains", "multipleOf", "not", "patternProperties",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
}  # fmt: skip
_ASSERTIONS = _TYPED | _NEVER | {"type", *_VALUES, *_ALONE}
_PYTHON = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def checked_schema(source: str) -> str:
    """The schema with types written out where one keyword implies them.

    Raises:
        ValueError: it is no schema, or holds a word that could not be kept to.
    """
    root = json.loads(source)
    return json.dumps(_Rules(root).checked(root), ensure_ascii=False)


class _Rules:
    def __init__(self, root: Any) -> None:
        self._root = root

    def checked(self, schema: Any) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{json.dumps(schema)[:40]} is not a schema")
        words = {word for word in _ASSERTIONS & schema.keys() if schema[word] is not False or word != "uniqueItems"}
        if "$id" in schema and schema is not self._root:
            raise ValueError("'$id' is supported at the top only")
        if never := sorted(words & _NEVER):
            raise ValueError(f"'{never[0]}' is not supported")
        self._check_form(schema, words)
        return self._parts_checked(_with_pattern(_with_required(_with_type(schema, words)), words))

    def _check_form(self, schema: dict[str, Any], words: set[str]) -> None:
        for word in (*_ALONE, *_VALUES):
            if word in words:
                beside = words - {word} - ({"type"} if word in _VALUES else set())
                if beside:
                    raise ValueError(f"'{min(beside)}' beside '{word}' is not supported")
        if "$ref" in words:
            self._resolved(schema["$ref"])
        if len(_list(schema, "allOf")) > 1:
            raise ValueError("'allOf' of more than one schema is not supported")
        if "oneOf" in words:
            self._check_exclusive(_list(schema, "oneOf"))
        for value in _values(schema):
            if "type" in words and not any(_is(value, each) for each in _types(schema)):
                raise ValueError(f"{json.dumps(value)[:40]} is not of 'type' {json.dumps(schema['type'])[:40]}")

    def _parts_checked(self, schema: dict[str, Any]) -> dict[str, Any]:
        schema = dict(schema)
        for word in ("properties", "$defs", "definitions"):
            if isinstance(parts := schema.get(word), dict):
                schema[word] = {name: self.checked(part) for name, part in parts.items()}
        for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if word in schema:
                schema[word] = [self.checked(part) for part in _list(schema, word)]
        for word in ("items", "additionalProperties"):
            if word in schema:
                schema[word] = self.checked(schema[word])
        return schema

    def _check_exclusive(self, parts: list[Any]) -> None:
        """`oneOf` is compiled as `anyOf`: no value may fit two of them."""
        for i, part in enumerate(parts):
            for other in parts[:i]:
                if not self._exclude(part, other):
                    raise ValueError("'oneOf' whose schemas are not told apart by type or value is not supported")

    def _exclude(self, one: Any, other: Any, depth: int = 0) -> bool:
        one, other = self._followed(one), self._followed(other)
        if not isinstance(one, dict) or not isinstance(other, dict) or depth > 2:
            return one is False or other is False
        if _values(one) and _values(other):
            return not {json.dumps(each) for each in _values(one)} & {json.dumps(each) for each in _values(other)}
        if not _overlap(_types(one), _types(other)):
            return True
        both = set(_names(one)) & set(_names(other))
        return _types(one) == _types(other) == {"object"} and any(
            self._exclude(one["properties"][name], other["properties"][name], depth + 1) for name in both
        )

    def _followed(self, schema: Any) -> Any:
        seen = 0
        while isinstance(schema, dict) and "$ref" in schema and (seen := seen + 1) < 8:
            schema = self._resolved(schema["$ref"])
        return schema

    def _resolved(self, reference: Any) -> Any:
        """What a reference within the schema leads to."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise ValueError(f"'$ref' {json.dumps(reference)[:60]} is not supported; allowed are '#' and '#/...'")
        schema = self._root
        for name in reference.split("/")[1:]:
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(schema, dict) or name not in schema:
                raise ValueError(f"'$ref' {json.dumps(reference)[:60]} leads nowhere")
            schema = schema[name]
        return schema


def _with_type(schema: dict[str, Any], words: set[str]) -> dict[str, Any]:
    """A keyword of one type holds for that type alone; whoever leaves the type out means it."""
    typed = words & _TYPED
    if "type" not in words:
        implied = [name for name, own in _OF_TYPE.items() if name != "integer" and typed & own]
        if len(implied) > 1:
            raise ValueError(f"'{min(typed)}' needs a 'type' beside it")
        return {"type": implied[0], **schema} if implied else schema
    for word in sorted(typed):
        if not any(word in _OF_TYPE.get(each, ()) for each in _types(schema)):
            raise ValueError(f"'{word}' is not supported beside 'type' {json.dumps(schema['type'])[:60]}")
    return schema


def _with_required(schema: dict[str, Any]) -> dict[str, Any]:
    """xgrammar forgets what is required but not among the properties."""
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    names = [each for each in _list(schema, "required") if isinstance(each, str)]
    missing = [name for name in names if isinstance(properties, dict) and name not in properties]
    if missing and rest is False:
        raise ValueError(f"'required' has {json.dumps(missing[0])[:40]}, which 'properties' has not")
    return schema | {"properties": properties | dict.fromkeys(missing, rest)} if missing else schema


def _with_pattern(schema: dict[str, Any], words: set[str]) -> dict[str, Any]:
    """A string's pattern as one of JSON text. Of format, pattern and length xgrammar keeps to one."""
    lengths = words & {"minLength", "maxLength"}
    own = sorted(words & {"format", "pattern"}) + sorted(lengths)[:1]
    if len(own) > 1:
        raise ValueError(f"'{own[0]}' beside '{own[1]}' is not supported")
    return schema | {"pattern": json_pattern(_of_kind(schema, "pattern", str))} if "pattern" in words else schema


def _of_kind(schema: dict[str, Any], word: str, kind: type) -> Any:
    if type(schema[word]) is not kind:
        raise ValueError(f"'{word}' is {json.dumps(schema[word])[:40]}")
    return schema[word]


def _types(schema: dict[str, Any]) -> set[str]:
    """Of its values; every type when it does not say."""
    if "type" in schema:
        kind = schema["type"]
        return {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}
    if values := _values(schema):
        return {name for value in values for name in _OF_TYPE if _is(value, name)}
    implied = {name for name, own in _OF_TYPE.items() if own & schema.keys() and name != "integer"}
    return implied if len(implied) == 1 else set(_OF_TYPE)


def _overlap(one: Iterable[str], other: Iterable[str]) -> bool:
    """An integer is a number."""
    wide = {"integer": "number"}
    return bool({wide.get(each, each) for each in one} & {wide.get(each, each) for each in other})


def _is(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int | float) and not isinstance(value, bool) and (kind == "number" or value % 1 == 0)
    return isinstance(value, _PYTHON.get(kind, ()))


def _values(schema: dict[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _list(schema, "enum")


def _names(schema: dict[str, Any]) -> list[str]:
    """Properties that every value has."""
    properties = schema.get("properties", {})
    return [name for name in _list(schema, "required") if isinstance(name, str) and name in properties]


def _list(schema: dict[str, Any], word: str) -> list[Any]:
    parts = schema.get(word, [])
    if not isinstance(parts, list):
        raise ValueError(f"'{word}' is not a list")
    return parts
