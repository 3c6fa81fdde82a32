"""Sequences whose grammar is being compiled: they are the scheduler's once that is done."""

from __future__ import annotations

from backend_lib.arena import SlotRef
from backend_lib.worker.agreement import Prepared
from backend_lib.worker.grammar import CompiledGrammar, GrammarCompiler, GrammarState
from backend_lib.worker.sequence import Sequence


class Preparation:
    """Owned by the loop's thread. Every rank of a group holds the sequences; rank 0, which samples, compiles."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._sequences: dict[SlotRef, Sequence] = {}
        self._grammars: dict[SlotRef, CompiledGrammar] = {}  # of those that are done, until they are taken out

    def begin(self, sequence: Sequence) -> None:
        """Compile its grammar, beside the loop."""
        assert sequence.grammar is not None
        ref = SlotRef(sequence.slot, sequence.generation)
        self._sequences[ref] = sequence
        self._compiler.submit(ref, sequence.grammar)

    def done(self) -> list[Prepared]:
        """Those that have been compiled, or cannot be, since the last call."""
        found = []
        for ref, grammar, error in self._compiler.take():
            assert isinstance(ref, SlotRef)
            if grammar is not None:
                self._grammars[ref] = grammar
            found.append(Prepared(ref.slot, ref.generation, error))
        return found

    def take(self, slot: int, generation: int) -> Sequence | None:
        """A sequence that is ready to start. None when it has been aborted meanwhile.

        Raises ValueError when its grammar does not allow what an earlier worker has published.
        """
        ref = SlotRef(slot, generation)
        sequence, grammar = self._sequences.pop(ref, None), self._grammars.pop(ref, None)
        if sequence is not None and grammar is not None:
            published = sequence.output_ids[: sequence.output_len].tolist()
            sequence.grammar_state = GrammarState(grammar, published)
        return sequence

    def abort(self, slot: int, generation: int) -> Sequence | None:
        """Forget a sequence, and return it. None: it is not here."""
        ref = SlotRef(slot, generation)
        self._grammars.pop(ref, None)
        sequence = self._sequences.pop(ref, None)
        if sequence is not None:
            self._compiler.cancel(ref)
        return sequence
