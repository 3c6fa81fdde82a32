"""From a grammar's words to xgrammar's automaton. Importing this imports xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import xgrammar

from backend_lib.request import Grammar, GrammarKind
from backend_lib.worker.grammar.mask import mask_of
from backend_lib.worker.grammar.regex_rules import checked_regex
from backend_lib.worker.grammar.schema_rules import checked_schema
from backend_lib.worker.grammar.state import CompiledGrammar, GrammarState
from backend_lib.worker.grammar.vocabulary import Vocabulary

MAX_SOURCE_BYTES = 1 << 18
MAX_GRAMMAR_BYTES = 64 << 20
_MAX_REASON = 160  # characters
# Where in xgrammar's sources an error was found, and the check that found it, are of no use to a client.
_ORIGIN = re.compile(r"\[\d\d:\d\d:\d\d\] \S+:\d+: |Check failed: \(.*?\) is false: ")
_QUOTED_SOURCE = re.compile(r"\.? ?The JSON string is:.*", re.DOTALL)

# What xgrammar writes for a character of a string, in its EBNF, and what JSON and UTF-8 allow. A literal's quotes are
# written otherwise, so nothing else is meant. Escapes in a string of bounded length would be right, but take every mask
# in it from 10 us to 10 ms: those are computed ahead only for a rule that is one class.
_CHARACTERS = {
    r"::= (([^\"\\\r\n]))": r"::= (([^\"\\\0-\x1f\ud800-\udfff]))",
    r"([^\0-\x1f\"\\\r\n] ": r"([^\0-\x1f\"\\\r\n\ud800-\udfff] ",
}


class Builder:
    """Compiles for one vocabulary. Threads may share it: Python's lock is free while xgrammar works."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        size, stops = len(vocabulary.tokens), vocabulary.stop_token_ids
        tokens = list(vocabulary.tokens)
        kind = xgrammar.VocabType.RAW  # they are bytes already
        info = xgrammar.TokenizerInfo(tokens, kind, vocab_size=size, stop_token_ids=list(stops))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._stops = mask_of(stops, size)

    def build(self, grammar: Grammar) -> CompiledGrammar:
        """Raises ValueError with the reason, in words for the client, when it cannot be used."""
        try:
            return self._build(grammar)
        except (RuntimeError, ValueError, MemoryError) as error:  # RuntimeError is xgrammar's, and Python's own depth
            raise ValueError(_reason(error)) from None

    def _build(self, grammar: Grammar) -> CompiledGrammar:
        size = len(grammar.source.encode())
        if size > MAX_SOURCE_BYTES:
            raise ValueError(f"it has {size} bytes; allowed are at most {MAX_SOURCE_BYTES}")
        handle = _COMPILE[grammar.kind](self._compiler, grammar.source)
        compiled = CompiledGrammar(handle, self._stops, len(self._vocabulary.tokens), handle.memory_size_bytes)
        if compiled.num_bytes > MAX_GRAMMAR_BYTES:
            raise ValueError(f"it takes {compiled.num_bytes >> 20} MiB; allowed are at most {MAX_GRAMMAR_BYTES >> 20}")
        if GrammarState(compiled).is_stuck:
            raise ValueError("no token of this model can begin a text that matches")
        return compiled


def _json_object(compiler: Any, source: str) -> Any:
    return _from_schema(compiler, '{"type": "object"}')


def _json_schema(compiler: Any, source: str) -> Any:
    return _from_schema(compiler, checked_schema(source))


def _from_schema(compiler: Any, schema: str) -> Any:
    """Left alone, a string of bounded length could hold control characters, and any string half a surrogate pair."""
    rules = str(xgrammar.Grammar.from_json_schema(schema))
    for loose, strict in _CHARACTERS.items():
        rules = rules.replace(loose, strict)
    return compiler.compile_grammar(rules)


def _regex(compiler: Any, source: str) -> Any:
    return compiler.compile_regex(checked_regex(source))


def _ebnf(compiler: Any, source: str) -> Any:
    return compiler.compile_grammar(source)


def _choice(compiler: Any, source: str) -> Any:
    choices = json.loads(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise ValueError("it is not a list of one or more strings")
    return compiler.compile_grammar("root ::= " + " | ".join(map(_literal, choices)))


def _literal(text: str) -> str:
    """As EBNF. Everything but letters and digits is written by its code point, so nothing in it means anything."""
    text.encode()  # half a surrogate pair is no text
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        return "it takes too much memory to compile"
    text = _QUOTED_SOURCE.sub("", _ORIGIN.sub("", str(error)))
    return "".join(c if c.isprintable() else " " for c in text).strip()[:_MAX_REASON]


_COMPILE: dict[GrammarKind, Callable[[Any, str], Any]] = {
    GrammarKind.JSON_OBJECT: _json_object,
    GrammarKind.JSON_SCHEMA: _json_schema,
    GrammarKind.REGEX: _regex,
    GrammarKind.EBNF: _ebnf,
    GrammarKind.CHOICE: _choice,
}
