"""What is asked: prompts and lengths, the same for the same seed."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# Each is one token, with and without a space before it, in SmolLM2's vocabulary, and in most byte-level ones.
WORDS_FILE = Path(__file__).with_name("words.txt")

# Every request has the length it was given, and every run the same tokens.
DEFAULT_SAMPLING = {"temperature": 0, "ignore_eos": True}


class LoadRequest(NamedTuple):
    text: str
    sampling: Mapping[str, Any]  # max_tokens among them


class Lengths(NamedTuple):
    """A number of tokens, drawn uniformly from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """From "128" or "64:256". Raises ValueError for anything else."""
        low, _, high = text.partition(":")
        lengths = cls(int(low), int(high or low))
        if not 0 < lengths.low <= lengths.high:
            raise ValueError(f"{text!r} is no length; allowed are 128 and 64:256, from 1")
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests by number. `lines`, when there are any, say what `input_tokens` and `output_tokens` say otherwise.

    A prompt is its group's shared prefix (request i is in group i modulo `prefix_groups`) and then words of its own.
    """

    input_tokens: Lengths
    output_tokens: Lengths
    words: Sequence[str]
    prefix_tokens: int = 0
    prefix_groups: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[Mapping[str, Any]] = ()
    seed: int = 0

    def requests(self, level: str) -> Iterator[LoadRequest]:
        """Endless. Prompts differ between levels, so that one level does not fill the prefix cache for the next."""
        return (self.request(level, number) for number in itertools.count())

    def request(self, level: str, number: int) -> LoadRequest:
        rng = random.Random(f"{self.seed}/{level}/{number}")
        line = dict(self.lines[number % len(self.lines)]) if self.lines else {}
        text, prompt_tokens = line.pop("text_input", None), line.pop("prompt_tokens", None)
        if text is None:
            text = self._text(rng, prompt_tokens or self.input_tokens.draw(rng))
        if self.prefix_tokens:
            text = f"{self._prefix(number % self.prefix_groups)} {text}"
        line.setdefault("max_tokens", self.output_tokens.draw(rng))
        return LoadRequest(text, {**DEFAULT_SAMPLING, **self.sampling, **line})

    def _prefix(self, group: int) -> str:
        return self._text(random.Random(f"{self.seed}/prefix/{group}"), self.prefix_tokens)

    def _text(self, rng: random.Random, tokens: int) -> str:
        return " ".join(rng.choices(self.words, k=tokens))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A request file: JSON lines with `text_input` or `prompt_tokens`, `max_tokens`, and other sampling fields.

    Raises:
        ValueError: names the file and the line that cannot be used.
    """
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        if text.strip():
            try:
                lines.append(_checked(json.loads(text)))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None
    if not lines:
        raise ValueError(f"{path} holds no request")
    return lines


def _checked(line: Any) -> dict[str, Any]:
    if not isinstance(line, dict) or ("text_input" in line) == ("prompt_tokens" in line):
        raise ValueError("allowed is a JSON object with either text_input or prompt_tokens")
    if not isinstance(line.get("text_input", ""), str):
        raise ValueError(f"'text_input' is {line['text_input']!r}; allowed is a string")
    for name in ("prompt_tokens", "max_tokens"):
        if name in line and not (isinstance(line[name], int) and line[name] > 0):
            raise ValueError(f"'{name}' is {line[name]!r}; allowed is a whole number from 1")
    return line
