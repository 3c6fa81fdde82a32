"""Hostile values drawn from a seed. What can be set is read from the table of fields, so a new field is drawn without a
change here. `fuzz_http` and `fuzz_grpc` make requests of them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from backend_lib.router.field import Field
from backend_lib.router.fields import ALIASES, FIELDS, TIMEOUT
from backend_lib.router.grammars import GUIDE_TYPES
from tests.support.checkpoints import hash_text
from tests.support.hashing import VOCAB


class Raw(str):
    """JSON text that is written as it stands, whether it is JSON or not."""


class Pairs(list):
    """The members of an object, a key perhaps twice."""


NUMBERS = (
    0, 1, -1, 2, 7, 0.5, -0.0, 1.5, 1e-320, 5e-324, 1e-5, 1e22, 1e308, -1e308, (1 << 31) - 1, 1 << 31, -(1 << 31) - 1,
    1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, -(1 << 63), -(1 << 63) - 1, (1 << 64) - 1, 1 << 64, 10**30, 10**400,
)  # fmt: skip
TEXTS = (
    "", " ", "a", "true", "TRUE", "False", "1", "0", "-1", "+1", " 5 ", "0.7", "1e5", "1e400", "1_000", "１２", "nan",
    "inf", "-Infinity", "0x10", "9" * 100_000, "0" * 5000 + "1", "\x00", "a\x00b", "\ufeff{}", "💥", "é" * 1000,
    "x" * 1025, "[", "[]", '["a"]', '["a", 1]', "[1, 2]", "[[1]]", "[" * 3000, "[" * 900 + "]" * 900, "{}", "null",
    "\r\n\t", "\u2028",
)  # fmt: skip
RAWS = tuple(
    Raw(text)
    for text in (
        "1e400", "-1e400", "9" * 4000, "9" * 100_000, "0." + "9" * 5000, "NaN", "Infinity", "-Infinity", "01", "1.",
        "nul", "'a'", '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"a\nb"', "[" * 200 + "]" * 200,
        "[" * 900 + "]" * 900,
        "[" * 980 + "]" * 980, '{"a":' * 500 + "1" + "}" * 500, "[" * 100_000, "/* */ 1", "1,", "",
    )
)  # fmt: skip

_ANY = (None, True, False, float("nan"), float("inf"), *NUMBERS, *TEXTS, *RAWS)
_LONG = (
    '{"a":' * 2000, "[" * 100_000, '{"stop": [' + '"a",' * 20_000 + '"a"]}',
    '{"stop_token_ids": [' + "1," * 50_000 + "1]}",
    '{"a": "' + "a" * (1 << 20) + '"}',
)  # fmt: skip
_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, None, "\u0000"]}}}
_FORMS = (
    None, True, False, _SCHEMA, json.dumps(_SCHEMA), {"$ref": "#"}, {"type": []}, "(a|b)*", "(", "[^]", "a{9999}",
    'root ::= "a"', "root ::= root", ["x", "y"], ["x", ""], {"json": _SCHEMA}, {"regex": "a"}, {"choice": ["a"]},
    {"json_object": True}, {"json": {}, "regex": "a"}, {"type": "text"}, {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": _SCHEMA}}, {"type": "json_schema"}, *GUIDE_TYPES,
)  # fmt: skip
BOUND = 60.0  # seconds that a request may take, on a busy machine


def to_json(value: Any) -> str:
    """JSON of a value with `Raw` and `Pairs` in it; what JSON cannot spell is written as Python's JSON writes it."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ", ".join(f"{json.dumps(key)}: {to_json(each)}" for key, each in value) + "}"
    if isinstance(value, dict):
        return to_json(Pairs(value.items()))
    if isinstance(value, list):
        return "[" + ", ".join(map(to_json, value)) + "]"
    return json.dumps(value)


def bounds(field: Field) -> list[Any]:
    """A field's limits and what lies beside them, as numbers, texts, lists, objects and lengths."""
    ends = (field.low, field.high, 0, VOCAB - 1)
    numbers = [bound + step for bound in ends for step in (-1, 0, 1)]
    lengths = ["x" * int(number) for number in numbers if 0 <= number <= 4096]
    counts = (0, 1, *(count for count in (field.most(VOCAB), field.most(VOCAB) + 1) if count <= 2 * VOCAB))
    lists = [[each] * count for each in ("a", field.low) for count in counts]
    objects = [{str(token_id): bias for token_id in range(count)} for bias in numbers[:6] for count in (1, counts[-1])]
    return [*numbers, *map(str, numbers), *map(float, numbers), *lengths, *lists, *objects, [lengths], *_FORMS]


@cache
def values(name: str) -> tuple[list[Any], list[Any]]:
    """Values of a field that pass and values that do not."""
    field = TIMEOUT if name == TIMEOUT.name else FIELDS[name]
    passing: list[Any] = []
    failing: list[Any] = []
    for value in [*bounds(field), *NUMBERS, *TEXTS]:
        (passing if _passes(field, value) else failing).append(value)
    return passing or [None], failing or [None]


def _passes(field: Field, value: Any) -> bool:
    try:
        field.parse(value, VOCAB)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Outcome:
    """How a request ended: "answer", "error", "left" (its client went) or "closed" (no answer is due)."""

    kind: str
    words: str = ""


class Draw(random.Random):
    """Draws of one case."""

    def likely(self, probability: float) -> bool:
        return self.random() < probability

    def any_value(self, depth: int = 0) -> Any:
        """Anything that JSON can spell, and some that it cannot."""
        if depth < 3 and self.likely(0.15):
            return [self.any_value(depth + 1) for _ in range(self.choice((0, 1, 2, 65)))]
        if depth < 3 and self.likely(0.1):
            return Pairs((self.name(), self.any_value(depth + 1)) for _ in range(self.choice((0, 1, 3))))
        return self.choice(_ANY)

    def name(self) -> str:
        """A field, most often, or a name that is none."""
        if self.likely(0.9):
            return self.choice(tuple(FIELDS) if self.likely(0.8) else tuple(ALIASES))
        odd = ("", "max_token", "MAX_TOKENS", "sampling_parameters", "text_input", "timeout", "a\x00b", "\ud800", "é")
        return self.choice((*odd, "x" * 5000, "id", "priority", "sequence_id", "a-b", "triton_x", "__class__"))

    def field(self, good: float) -> tuple[str, Any]:
        """A name and a value, which passes with the probability `good`."""
        name = self.name()
        field = ALIASES.get(name, name)
        if field not in FIELDS or self.likely((1 - good) / 3):
            return name, self.any_value()
        passing, failing = values(field)
        return name, self.choice(passing if self.likely(good) else failing)

    def fields(self) -> Pairs:
        good = self.choice((1.0, 0.9, 0.5))
        return Pairs(self.field(good) for _ in range(self.randrange(7)))

    def prompt(self) -> str:
        ids = [self.randrange(3, VOCAB) for _ in range(self.choice((1, 3, 40)))]
        odd = ("", "?", "\x00", "a\x00" + hash_text(ids), "丅" * 30_000, "é" * 300, "\ud800", " " * 1000)
        return hash_text(ids) if self.likely(0.85) else self.choice(odd)

    def messages(self) -> str:
        """What `messages` may hold: a conversation, one with something odd in it, or another JSON text."""
        whole = [{"role": "user", "content": self.prompt()} for _ in range(self.choice((1, 1, 2, 5)))]
        if self.likely(0.5):
            return json.dumps(whole)
        self.choice(whole)[self.choice(("role", "content", "tool_calls", "name", "x"))] = self.any_value()
        return to_json(whole) if self.likely(0.6) else self.broken(to_json(whole))

    def sampling_text(self) -> str:
        """What `sampling_parameters` may hold: an object of fields, or what is left of one."""
        text = to_json(self.fields())
        return text if self.likely(0.7) else self.broken(text)

    def broken(self, text: str) -> str:
        """JSON text that has been damaged, or another one."""
        cut = self.randrange(len(text) + 1)
        damaged = (
            text[:cut], text + text, text + "x", "\ufeff" + text, f"[{text}]", text[:cut] + "\x00" + text[cut:],
            f" \n{text}\t", text.replace('"', "'"),
        )  # fmt: skip
        if self.likely(0.2):
            return to_json(self.any_value())
        return self.choice(damaged) if self.likely(0.85) else self.choice(_LONG)

    def encoded(self, text: str) -> bytes:
        encoding = self.choice(("utf-16", "latin-1", "utf-32", "utf-7")) if self.likely(0.06) else "utf-8"
        return text.encode(encoding, "surrogatepass" if encoding == "utf-8" else "replace")
