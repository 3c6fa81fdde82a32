"""What each format of weights costs in quality: perplexity on a fixed text, and distance from float32's logits.

    python benchmarks/quality.py                                  # fp32, fp16, int8, int4 and auto, as served
    python benchmarks/quality.py --dtype float32                  # the same with a float32 KV cache
    python benchmarks/quality.py --weights fp32 --comparators     # other ways to keep weights, against fp32

The text is cut into windows of 512 tokens that do not overlap. Each is a sequence of its own, computed in chunks of 256
tokens as the worker does, and all but its first token are predicted. The token that a model wants at the beginning of a
text stands before each. docs/weights.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file, which puts only its own folder on the path
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from backend_lib.checkpoint import DecoderConfig, open_checkpoint
from benchmarks.formats.comparators import COMPARATORS, MEANINGS
from benchmarks.formats.report import COLUMNS, cells, markdown_table, text_table
from benchmarks.formats.subject import REFERENCE, Result, Subject, Task

TEXT = Path(__file__).parent / "data" / "quality.txt"
FORMATS = ("fp32", "fp16", "int8", "int4", "auto")
WINDOW = 512
CHUNK = 256


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    names = [REFERENCE, *(name for name in args.weights if name != REFERENCE)]
    names += COMPARATORS if args.comparators else []
    checkpoint = open_checkpoint(args.model)
    assert isinstance(checkpoint.config, DecoderConfig)
    prefix = checkpoint.tokenizer.encode("").ids
    ids = checkpoint.tokenizer.encode(args.text.read_text(encoding="utf-8")).ids[len(prefix) :]
    tasks = [Task(name, args.model, args.dtype, args.threads, CHUNK) for name in names]
    results = measure(tasks, spread(list(windows(ids, prefix)), args.tokens), checkpoint.config.vocab_size)
    _show(results, args)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--comparators", action="store_true", help="; ".join(f"{k}: {v}" for k, v in MEANINGS.items()))
    parser.add_argument(
        "--dtype", choices=("auto", "float32"), default="auto", help="the setting: type of the KV cache"
    )
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, help="of the text, from all of it; default all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    parser.add_argument("--markdown", action="store_true")
    return parser


def windows(ids: list[int], prefix: list[int]) -> Iterator[list[int]]:
    """Of `WINDOW` tokens with the prefix; the last one may be shorter, and predicts a token at least."""
    size = WINDOW - len(prefix)
    for start in range(0, len(ids) - (not prefix), size):
        yield prefix + ids[start : start + size]


def spread(cut: list[list[int]], tokens: int | None) -> list[list[int]]:
    """Windows for so many tokens, at even distances, so that each kind of text has its share."""
    count = min(len(cut), -(-tokens // WINDOW)) if tokens else len(cut)
    return [cut[place * len(cut) // count] for place in range(count)]


def measure(tasks: Sequence[Task], cut: Sequence[list[int]], vocab_size: int) -> list[Result]:
    """The first task is the reference; each window goes through all decoders in turn."""
    shared = torch.empty(WINDOW, vocab_size).share_memory_()
    subjects = []
    for task in tasks:  # one after the other, so that loading has the machine to itself
        subjects.append(Subject(task, shared))
        print(f"{task.name} loaded", file=sys.stderr)
    for number, ids in enumerate(cut, 1):
        for subject in subjects:
            subject.compute(ids)
        print(f"\rwindow {number} of {len(cut)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return [subject.result() for subject in subjects]


def _show(results: Sequence[Result], args: argparse.Namespace) -> None:
    rows = [COLUMNS, *map(cells, results)]
    print(f"{results[0].quality.tokens} predicted tokens of {args.text.name}, model {args.model}, dtype {args.dtype}")
    print(markdown_table(rows) if args.markdown else text_table(rows))
    if args.json:
        figures = [
            {"name": each.name, **each.costs._asdict(), **each.quality._asdict(), "prefill": each.tokens_per_second}
            for each in results
        ]
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
