"""Sequences whose grammar is being compiled: they are the scheduler's once that is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from backend_lib.arena import Event, SlotRef
from backend_lib.request import FinishReason
from backend_lib.worker.agreement import EventKind
from backend_lib.worker.grammar import Compiled, GrammarCompiler
from backend_lib.worker.sequence import Sequence


class Refused(NamedTuple):
    words: str
    finish: FinishReason


class Preparation:
    """Owned by the loop's thread. Every rank of a group holds the sequences; rank 0, which samples, compiles and
    follows, and what comes of it is told to all as an event."""

    def __init__(
        self, compiler: GrammarCompiler | None, *, on_begun: Callable[[int], None] = lambda slot: None
    ) -> None:
        """`compiler`: rank 0's. `on_begun(slot)`: from now on its sequence takes the loop's time."""
        self._compiler = compiler
        self._on_begun = on_begun
        self._sequences: dict[SlotRef, Sequence] = {}
        self._refused: dict[SlotRef, Refused] = {}  # of those that have been found out, until they are taken out
        self._found: list[Event] = []

    def begin(self, sequence: Sequence) -> None:
        """Compile its grammar, beside the loop."""
        assert sequence.grammar is not None
        ref = SlotRef(sequence.slot, sequence.generation)
        self._sequences[ref] = sequence
        if self._compiler is None:
            return
        try:
            self._compiler.submit(ref, sequence.grammar)
        except RuntimeError as error:
            self._refuse(ref, f"the request could not be prepared: {error}", FinishReason.ERROR)

    def done(self) -> list[Event]:
        """Those that may start, or cannot, since the last call. Rank 0's."""
        assert self._compiler is not None
        for compiled in self._compiler.take():
            self._follow(compiled)
        found, self._found = self._found, []
        return found

    def take(self, slot: int, generation: int) -> tuple[Sequence, Refused | None] | None:
        """A sequence that has been found out about, and on rank 0 why it cannot start, if so. None when it has been
        aborted meanwhile."""
        ref = SlotRef(slot, generation)
        refused = self._refused.pop(ref, None)
        sequence = self._sequences.pop(ref, None)
        return None if sequence is None else (sequence, refused)

    def abort(self, slot: int, generation: int) -> Sequence | None:
        """End a sequence, and return it: it is gone at once. None: it is not here."""
        ref = SlotRef(slot, generation)
        self._refused.pop(ref, None)
        sequence = self._sequences.pop(ref, None)
        if sequence is None:
            return None
        sequence.finish = FinishReason.CANCELLED
        if self._compiler is not None:
            self._compiler.cancel(ref)
        return sequence

    def _follow(self, compiled: Compiled) -> None:
        """Match what has been published with the grammar, which takes time that the sequence answers for."""
        ref, error = compiled.key, compiled.error
        assert isinstance(ref, SlotRef)
        if compiled.grammar is not None:
            self._on_begun(ref.slot)
            try:
                self._sequences[ref].follow(compiled.grammar)
            except ValueError as problem:
                error = str(problem)
        if error:
            self._refuse(ref, error, FinishReason.INVALID)
        else:
            self._found.append(Event(EventKind.PREPARED, *ref))

    def _refuse(self, ref: SlotRef, words: str, finish: FinishReason) -> None:
        self._refused[ref] = Refused(words, finish)
        self._found.append(Event(EventKind.REFUSED, *ref))
