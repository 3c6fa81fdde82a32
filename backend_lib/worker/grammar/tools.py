"""What compiling needs, made when the first grammar comes."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import TYPE_CHECKING

from backend_lib.checkpoint import Checkpoint
from backend_lib.worker.grammar.prober import Prober
from backend_lib.worker.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from backend_lib.worker.grammar.builder import Builder


class Tools:
    """Threads share it; whoever comes first makes what is missing."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._lock = threading.RLock()

    def prober(self) -> Prober:
        with self._lock:
            return self._prober

    def builder(self) -> Builder:
        """Imports xgrammar."""
        with self._lock:
            return self._builder

    def close(self) -> None:
        with self._lock:
            if "_prober" in self.__dict__:
                self._prober.close()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._checkpoint)

    @cached_property
    def _prober(self) -> Prober:
        return Prober(self._vocabulary)

    @cached_property
    def _builder(self) -> Builder:
        from backend_lib.worker.grammar.builder import Builder

        return Builder(self._vocabulary)
