"""Grammars are compiled beside the infer loop, and only when another process has shown that it can be done.

xgrammar leaves Python's lock free while it compiles (a thread that spins beside it never waits longer than the
interpreter's own interval), so compiling in a thread stalls nobody. But nothing can stop it, and the time that a schema
takes grows with the square of its optional properties. So each grammar is compiled first in a process that may be
killed, within limits of time and memory (`probe`), and then here, where it is known to take as much. Handing the result
over instead would be slower: a grammar of 4 MB that compiles in 0.1 s is 200 MB as xgrammar writes it, which takes 8 s
to write and 3 s to read.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Hashable
from typing import NamedTuple

from backend_lib.checkpoint import Checkpoint
from backend_lib.request import Grammar, GrammarKind
from backend_lib.worker.grammar.cache import ResultCache
from backend_lib.worker.grammar.prober import Attempt
from backend_lib.worker.grammar.results import Refusal, Result
from backend_lib.worker.grammar.state import CompiledGrammar
from backend_lib.worker.grammar.tools import Tools

log = logging.getLogger("tandem")

_LANES = 2  # grammars compiled at the same time: one that takes its 5 s does not hold up all others
_STACK = 32 << 20  # more than the probe's: what it could do must be possible here
_CACHE_BYTES = 128 << 20
_TRIES = 2


class Compiled(NamedTuple):
    """What became of a submission: a grammar, or an error in words for the client."""

    key: Hashable
    grammar: CompiledGrammar | None
    error: str = ""


class GrammarCompiler:
    """For one checkpoint. All methods are for the loop's thread and return at once."""

    def __init__(self, checkpoint: Checkpoint, *, on_done: Callable[[], None]) -> None:
        self._on_done = on_done
        self._lock = threading.Lock()  # of all that follows
        self._keys: dict[Grammar, list[Hashable]] = {}  # who waits for what is not compiled yet
        self._attempts: dict[Grammar, Attempt] = {}
        self._done: list[Compiled] = []
        self._cache = ResultCache(_CACHE_BYTES)
        self._queue: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()
        self._tools = Tools(checkpoint)
        self._lanes: list[threading.Thread] = []

    def submit(self, key: Hashable, grammar: Grammar) -> None:
        """`key` is the caller's, and in use once only until it is taken or cancelled.

        Raises RuntimeError when no thread can be started.
        """
        with self._lock:
            self._start_lanes()
            result = self._cache.get(grammar)
            if result is not None:
                self._done.append(_compiled(key, result))
            elif grammar in self._keys:
                self._keys[grammar].append(key)
            else:
                self._keys[grammar] = [key]
                self._queue.put(grammar)
        if result is not None:
            self._on_done()

    def take(self) -> list[Compiled]:
        """What has finished since the last call."""
        with self._lock:
            done, self._done = self._done, []
        return done

    def cancel(self, key: Hashable) -> None:
        """Forget a submission, wherever it is; what nobody waits for any more is not compiled to its end."""
        with self._lock:
            self._done = [each for each in self._done if each.key != key]
            for grammar, keys in list(self._keys.items()):
                if key in keys:
                    keys.remove(key)
                    self._drop_unwanted(grammar)

    def close(self) -> None:
        """End the threads and the process; nothing that was submitted comes out any more."""
        with self._lock:
            for keys in self._keys.values():
                keys.clear()
            for attempt in self._attempts.values():
                attempt.stop()
            lanes, self._lanes = self._lanes, []
        for _ in lanes:
            self._queue.put(None)
        for lane in lanes:
            lane.join()
        self._tools.close()

    def _drop_unwanted(self, grammar: Grammar) -> None:
        if not self._keys[grammar] and grammar in self._attempts:
            self._attempts[grammar].stop()

    def _start_lanes(self) -> None:
        if self._lanes:
            return
        before = threading.stack_size(_STACK)
        self._lanes = [threading.Thread(target=self._run, name="tandem-grammar", daemon=True) for _ in range(_LANES)]
        for lane in self._lanes:
            lane.start()
        threading.stack_size(before)

    def _run(self) -> None:
        while grammar := self._queue.get():
            result = self._compile(grammar)
            with self._lock:
                keys = self._keys[grammar]
                if result is None and keys:
                    self._queue.put(grammar)  # submitted again after it had been stopped
                    continue
                del self._keys[grammar]
                if result is not None:
                    if not isinstance(result, Refusal) or result.is_lasting:
                        self._cache.put(grammar, result)
                    self._done.extend(_compiled(key, result) for key in keys)
            if keys:
                self._on_done()

    def _compile(self, grammar: Grammar) -> Result | None:
        """None when it was stopped because nobody waited for it. Whatever fails, this thread goes on to the next."""
        name = f"the {_NAMES[grammar.kind]} cannot be used"
        try:
            for _ in range(_TRIES):
                attempt = self._attempt(grammar)
                if attempt is None or attempt.is_stopped:
                    return None
                if attempt.verdict == "":
                    return self._tools.builder().build(grammar)
                if attempt.verdict is not None:
                    return Refusal(f"{name}: {attempt.verdict}")
        except ValueError as error:  # the grammar's own
            return Refusal(f"{name}: {error}")
        except Exception as error:  # no memory, no descriptor, no thread
            log.exception("a grammar could not be compiled")
            return Refusal(f"{name} now: {error}", is_lasting=False)
        return Refusal(f"{name} now: the process that tries grammars out was ended", is_lasting=False)

    def _attempt(self, grammar: Grammar) -> Attempt | None:
        """One that is over. None: nobody waits for it any more."""
        attempt = Attempt(grammar)
        with self._lock:
            if not self._keys[grammar]:
                return None
            self._attempts[grammar] = attempt
        try:
            prober = self._tools.prober()
            pid = prober.send(attempt)
            self._tools.builder()  # imported while the process imports the same
            attempt.wait()
            if attempt.hangs:
                prober.restart(pid)
        finally:
            with self._lock:
                del self._attempts[grammar]
        return attempt


def _compiled(key: Hashable, result: Result) -> Compiled:
    return Compiled(key, None, result.words) if isinstance(result, Refusal) else Compiled(key, result)


_NAMES = {
    GrammarKind.JSON_OBJECT: "JSON object",
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.EBNF: "grammar",
    GrammarKind.CHOICE: "list of choices",
}
