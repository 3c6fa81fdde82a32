"""Prompts of an exact number of tokens, all of them different, as text and as ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.rivals.waves import Prompt
from benchmarks.serving.workload import WORDS_FILE, Lengths, Workload


class Prompts:
    """Made as `benchmarks/serve.py` makes them: of words that are one token each."""

    def __init__(self, encode: Callable[[str], Sequence[int]]) -> None:
        """`encode`: from a text to its ids."""
        self._encode = encode
        self._words = WORDS_FILE.read_text().split()

    def make(self, label: str, count: int, tokens: int) -> list[Prompt]:
        """The same for the same label. Raises ValueError when the tokenizer cuts the words otherwise."""
        lengths = Lengths(tokens, tokens)
        workload = Workload(input_tokens=lengths, output_tokens=Lengths(1, 1), words=self._words)
        return [self._checked(workload.request(label, number).text, tokens) for number in range(count)]

    def _checked(self, text: str, tokens: int) -> Prompt:
        ids = list(self._encode(text))
        if len(ids) != tokens:
            raise ValueError(f"{tokens} words are {len(ids)} tokens in this model")
        return Prompt(text, ids)
