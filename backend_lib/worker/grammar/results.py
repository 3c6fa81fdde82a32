"""What becomes of a grammar."""

from __future__ import annotations

from typing import NamedTuple

from backend_lib.worker.grammar.state import CompiledGrammar


class Refusal(NamedTuple):
    """Why a grammar cannot be used. `is_lasting`: that lies in the grammar; otherwise it may go better another time."""

    words: str
    is_lasting: bool = True


Result = CompiledGrammar | Refusal
