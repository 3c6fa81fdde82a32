"""What constraints on the output cost, and what they keep to.

    python benchmarks/grammar.py                                  time of masks and of compiling
    python benchmarks/grammar.py --suite JSON-Schema-Test-Suite   and the instances of that suite's schemas

Times are the best of several repetitions on one thread. The suite is a checkout of the JSON Schema organisation's
JSON-Schema-Test-Suite; of each schema's instances, which ones may a model write, beside xgrammar left to itself?
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import xgrammar

from backend_lib.checkpoint import open_checkpoint
from backend_lib.request import Grammar, GrammarKind
from backend_lib.worker.grammar import GrammarState, apply_masks, mask_width
from backend_lib.worker.grammar.builder import Builder
from backend_lib.worker.grammar.vocabulary import Vocabulary

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "vip"]}, "maxItems": 5},
    },
    "required": ["name", "age"],
}
WIDE = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(100)}}
SOURCES: dict[str, tuple[GrammarKind, str]] = {
    "any JSON object": (GrammarKind.JSON_OBJECT, ""),
    "person": (GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    "100 optional fields": (GrammarKind.JSON_SCHEMA, json.dumps(WIDE)),
    "enum of 1000": (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"value {i}" for i in range(1000)]})),
    "e-mail regex": (GrammarKind.REGEX, r"[a-z0-9.]{1,20}@[a-z]+\.(com|org)"),
    "200 characters regex": (GrammarKind.REGEX, ".{1,200}"),
    "choice of 3": (GrammarKind.CHOICE, '["yes", "no", "maybe"]'),
}
TEXT = '{"name": "Ada é Lovelace", "age": 36, "tags": ["new", "vip"]}'
DRAFTS = ("draft2020-12", "draft7")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="whose tokenizer")
    parser.add_argument("--suite", type=Path, help="checkout of JSON-Schema-Test-Suite")
    parser.add_argument("--sizes", type=int, nargs="+", default=[49152, 151936], help="of the vocabulary")
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(args.model)
    vocabulary = Vocabulary.of(checkpoint)
    for size in args.sizes:
        masks_of(widened(vocabulary, size), checkpoint.tokenizer)
    compiling(vocabulary)
    if args.suite:
        instances(args.suite, vocabulary, checkpoint.tokenizer)


def widened(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Of another size: what is missing is made of pairs of tokens that there are."""
    tokens = list(vocabulary.tokens[:size])
    words = [token for token in tokens if token.isascii() and token.isalpha()]
    pairs = (a + b for a in words for b in words)
    tokens += [next(pairs) for _ in range(size - len(tokens))]
    return Vocabulary(tuple(tokens), vocabulary.stop_token_ids)


def best_of(work: Callable[[], Any], times: int = 20) -> float:
    """Microseconds."""
    best = float("inf")
    for _ in range(times):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best * 1e6


def masks_of(vocabulary: Vocabulary, tokenizer: Any) -> None:
    size = len(vocabulary.tokens)
    builder = Builder(vocabulary)
    print(f"vocabulary of {size}: microseconds a row, mean and worst over the tokens of a text")
    print(f"{'':20} {'fill':>13} {'apply':>13} {'xgrammar apply':>15}")
    for name in ("any JSON object", "person"):
        kind, source = SOURCES[name]
        rows = list(walked(builder.build(Grammar(kind=kind, source=source)), tokenizer, size))
        columns = [f"{np.mean(each):6.0f} {max(each):6.0f}" for each in zip(*rows, strict=True)]
        print(f"{name:20} {columns[0]:>13} {columns[1]:>13} {columns[2]:>15}")


def walked(compiled: Any, tokenizer: Any, size: int) -> Iterator[tuple[float, float, float]]:
    """For each token of the text: filling a mask, applying it, and xgrammar's way to apply it."""
    mask, logits = np.empty((1, mask_width(size)), dtype=np.int32), torch.randn(1, size)
    ids: list[int] = []
    for token_id in tokenizer.encode(TEXT, add_special_tokens=False).ids:
        states = iter([GrammarState(compiled, ids) for _ in range(8)])
        fill = best_of(lambda states=states: next(states).fill(mask[0]), 8)
        apply = best_of(lambda: apply_masks(logits, [0], mask))
        theirs = best_of(lambda: xgrammar.apply_token_bitmask_inplace(logits, torch.from_numpy(mask), vocab_size=size))
        yield fill, apply, theirs
        ids.append(token_id)


def compiling(vocabulary: Vocabulary) -> None:
    builder = Builder(vocabulary)
    print("compiling, once; each grammar takes this twice, and 10 to 20 ms to start a process")
    for name, (kind, source) in SOURCES.items():
        began = time.perf_counter()
        compiled = builder.build(Grammar(kind=kind, source=source))
        print(f"{name:20} {(time.perf_counter() - began) * 1e3:8.1f} ms {compiled.num_bytes / 1024:8.0f} KiB")


class Case(NamedTuple):
    """A schema of the suite and texts that are, or are not, valid."""

    schema: Any
    texts: list[tuple[str, bool]]


def instances(suite: Path, vocabulary: Vocabulary, tokenizer: Any) -> None:
    """Both are asked token by token: is the text, and then an end, what the grammar allows?"""
    builder = Builder(vocabulary)
    print(f"{'':30} refused compiled | valid: written kept out | invalid: written kept out")
    for draft in DRAFTS:
        folder = suite / "tests" / draft
        if not folder.is_dir():
            sys.exit(f"{folder} is no folder; --suite is a checkout of JSON-Schema-Test-Suite")
        ours, theirs = Counter[str](), Counter[str]()
        for case in cases(folder):
            count(
                ours,
                case,
                lambda schema: builder.build(Grammar(kind=GrammarKind.JSON_SCHEMA, source=schema)),
                tokenizer,
            )
            count(theirs, case, lambda schema: plain(builder, schema), tokenizer)
        for name, counts in ((f"{draft}, this project", ours), (f"{draft}, plain xgrammar", theirs)):
            print(f"{name:30} {counts['refused']:7} {counts['compiled']:8} | {counts['True True']:14} "
                  f"{counts['True False']:8} | {counts['False True']:16} {counts['False False']:8}")  # fmt: skip


def cases(folder: Path) -> Iterator[Case]:
    for path in sorted(folder.glob("*.json")):
        for case in json.loads(path.read_text()):
            texts = [(json.dumps(each["data"], ensure_ascii=False), each["valid"]) for each in case["tests"]]
            yield Case(case["schema"], texts)


def plain(builder: Builder, schema: str) -> Any:
    """xgrammar's own reading of a schema, followed by the same state."""
    known = builder.build(Grammar(kind=GrammarKind.CHOICE, source='["a"]'))
    handle = builder._compiler.compile_json_schema(schema)
    return type(known)(handle, known.stops, known.vocab_size, handle.memory_size_bytes)


def count(counts: Counter[str], case: Case, compile_schema: Callable[[str], Any], tokenizer: Any) -> None:
    try:
        compiled = compile_schema(json.dumps(case.schema))
    except (ValueError, RuntimeError):
        counts["refused"] += 1
        return
    counts["compiled"] += 1
    for text, valid in case.texts:
        counts[f"{valid} {is_written(compiled, text, tokenizer)}"] += 1


def is_written(compiled: Any, text: str, tokenizer: Any) -> bool:
    try:
        state = GrammarState(compiled, tokenizer.encode(text, add_special_tokens=False).ids)
    except ValueError:
        return False
    mask = np.empty(len(compiled.stops), dtype=np.int32)
    state.fill(mask)
    return bool((mask & compiled.stops).any())


if __name__ == "__main__":
    main()
