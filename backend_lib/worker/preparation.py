"""Sequences whose grammar is being compiled: they are the scheduler's once that is done."""

from __future__ import annotations

from backend_lib.arena import SlotRef
from backend_lib.worker.agreement import Prepared
from backend_lib.worker.grammar import CompiledGrammar, GrammarCompiler
from backend_lib.worker.sequence import Sequence


class Preparation:
    """Owned by the loop's thread. Every rank of a group holds the sequences; rank 0, which samples, compiles."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._sequences: dict[SlotRef, Sequence] = {}
        self._grammars: dict[SlotRef, CompiledGrammar] = {}  # of those that are done, until they are taken out

    def begin(self, sequence: Sequence) -> None:
        """Compile its grammar, beside the loop. Raises ValueError when that cannot be begun."""
        assert sequence.grammar is not None
        ref = SlotRef(sequence.slot, sequence.generation)
        try:
            self._compiler.submit(ref, sequence.grammar)
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        self._sequences[ref] = sequence

    def done(self) -> list[Prepared]:
        """Those that have been compiled, or cannot be, since the last call."""
        found = []
        for ref, grammar, error in self._compiler.take():
            assert isinstance(ref, SlotRef)
            if grammar is not None:
                self._grammars[ref] = grammar
            found.append(Prepared(ref.slot, ref.generation, error))
        return found

    def take(self, slot: int, generation: int) -> tuple[Sequence, CompiledGrammar | None] | None:
        """A sequence that is done, and its grammar if there is one. None when it has been aborted meanwhile."""
        ref = SlotRef(slot, generation)
        grammar = self._grammars.pop(ref, None)
        sequence = self._sequences.pop(ref, None)
        return None if sequence is None else (sequence, grammar)

    def abort(self, slot: int, generation: int) -> Sequence | None:
        """Forget a sequence, and return it. None: it is not here."""
        ref = SlotRef(slot, generation)
        self._grammars.pop(ref, None)
        sequence = self._sequences.pop(ref, None)
        if sequence is not None:
            self._compiler.cancel(ref)
        return sequence
