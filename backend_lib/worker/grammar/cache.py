"""Grammars compiled lately, and those that cannot be."""

from __future__ import annotations

from collections import OrderedDict

from backend_lib.request import Grammar
from backend_lib.worker.grammar.results import Refusal, Result

_OVERHEAD = 512  # bytes of an entry beside source and automaton, about


class ResultCache:
    """Keeps at most `max_bytes`; the least recently used goes first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._results: OrderedDict[Grammar, Result] = OrderedDict()
        self.num_bytes = 0

    def get(self, grammar: Grammar) -> Result | None:
        """None: it is not here."""
        if grammar in self._results:
            self._results.move_to_end(grammar)
        return self._results.get(grammar)

    def put(self, grammar: Grammar, result: Result) -> None:
        """`grammar` is not there yet."""
        self._results[grammar] = result
        self.num_bytes += _size(grammar, result)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(*self._results.popitem(last=False))


def _size(grammar: Grammar, result: Result) -> int:
    return len(grammar.source) + _OVERHEAD + (len(result.words) if isinstance(result, Refusal) else result.num_bytes)
