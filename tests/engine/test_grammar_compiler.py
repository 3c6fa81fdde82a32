"""The compiler beside the loop: what it costs the loop, and what it survives."""

import json
import re
import subprocess
import sys
import threading
import time

import psutil
import pytest

from backend_lib.checkpoint import open_checkpoint
from backend_lib.request import Grammar, GrammarKind
from backend_lib.worker.grammar import Compiled, GrammarCompiler, GrammarState
from backend_lib.worker.grammar.cache import ResultCache
from backend_lib.worker.grammar.results import Refusal

# Each takes far longer, or more memory, than anybody should wait for.
EBNF_STARS = "root ::= " + " ".join(f'("a" | "b{i}")*' for i in range(3000))
MANY_OPTIONAL = json.dumps({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(4000)}})


class Asking:
    """A compiler, and a caller who waits where the loop would sleep."""

    def __init__(self) -> None:
        self.rung = threading.Event()
        self.compiler = GrammarCompiler(open_checkpoint("smollm2"), on_done=self.rung.set)
        self.taken: dict[str, Compiled] = {}

    def submit(self, key: str, kind: str, source: str = "") -> None:
        self.compiler.submit(key, Grammar(kind=GrammarKind(kind), source=source))

    def wait(self, key: str, timeout: float = 40.0) -> Compiled:
        deadline = time.monotonic() + timeout
        while key not in self.taken:
            assert self.rung.wait(deadline - time.monotonic()), f"{key} has not come"
            self.rung.clear()
            self.taken |= {each.key: each for each in self.compiler.take()}
        return self.taken.pop(key)

    def ask(self, kind: str, source: str = "") -> Compiled:
        self.submit("asked", kind, source)
        return self.wait("asked")

    @property
    def probe(self) -> psutil.Process:
        return psutil.Process(self.compiler._tools.prober().pid)


@pytest.fixture(scope="module")
def asking():
    asking = Asking()
    assert asking.ask("json_object").grammar
    yield asking
    probe = asking.probe
    asking.compiler.close()
    assert not probe.is_running()


def wait_until(condition, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_grammar_comes_out_ready_to_use(asking):
    grammar = asking.ask("choice", '["yes", "no"]').grammar
    state = GrammarState(grammar)
    assert state.accept(open_checkpoint("smollm2").tokenizer.encode("yes").ids[0]) and state.is_over


def test_errors_are_words_for_the_client_and_come_soon(asking):
    began = time.monotonic()
    done = asking.ask("regex", "(a")
    assert time.monotonic() - began < 1.0
    assert done.grammar is None
    assert done.error.startswith("the regular expression cannot be used: missing ), unterminated subpattern")


def test_all_who_wait_for_the_same_get_the_same(asking):
    for key in "abc":
        asking.submit(key, "regex", "[ab]{3}c")
    grammars = {id(asking.wait(key).grammar) for key in "abc"}
    asking.submit("d", "regex", "[ab]{3}c")
    assert grammars == {id(asking.wait("d").grammar)}


def test_what_takes_too_long_ends_in_time_and_the_next_does_not_wait_for_it(asking):
    held = psutil.Process().memory_info().rss
    began = time.monotonic()
    asking.submit("heavy", "ebnf", EBNF_STARS)
    gaps = gaps_of_a_spinning_thread(lambda: asking.submit("light", "regex", "x[yz]"))
    assert asking.wait("light").grammar and time.monotonic() - began < 4.0
    error = asking.wait("heavy").error
    assert error == "the grammar cannot be used: it takes more than 5 s to compile"
    assert time.monotonic() - began < 15.0
    assert psutil.Process().memory_info().rss - held < 256 << 20
    assert max(gaps) < 0.25  # submitting is no work; what a busy machine takes from any thread is allowed for
    assert asking.ask("ebnf", EBNF_STARS).error == error  # at once, from the cache


def gaps_of_a_spinning_thread(work, seconds: float = 0.5) -> list[float]:
    """Between two looks at the clock, while `work` has been asked for."""
    work()
    gaps, last = [], time.perf_counter()
    end = last + seconds
    while last < end:
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    return gaps


def test_compiling_leaves_pythons_lock_free(asking):
    """A thread that spins beside a compilation of a second or so goes on."""
    asking.submit("enum", "json_schema", json.dumps({"enum": [f"value number {i}" for i in range(5000)]}))
    gaps = gaps_of_a_spinning_thread(lambda: None, 1.5)
    assert asking.wait("enum").grammar and max(gaps) < 0.5


_HUNGRY = """
import socket
from backend_lib.worker.grammar.probe import BYTES, _set_limits
ours, theirs = socket.socketpair()
_set_limits(theirs)
held = bytearray(BYTES // 2)
try:
    bytearray(BYTES)
except MemoryError:
    print("refused")
"""


def test_memory_is_bounded_while_compiling():
    assert subprocess.run([sys.executable, "-c", _HUNGRY], capture_output=True, text=True).stdout == "refused\n"


def test_a_grammar_too_large_to_keep_is_refused(asking, monkeypatch):
    from backend_lib.worker.grammar import builder

    monkeypatch.setattr(builder, "MAX_GRAMMAR_BYTES", 1 << 10)  # in this process, which compiles what the other allowed
    error = asking.ask("json_schema", json.dumps({"enum": [f"number {i}" for i in range(2000)]})).error
    assert re.fullmatch(r"the JSON schema cannot be used: it takes \d+ MiB; allowed are at most 0", error)


def test_what_is_cancelled_is_stopped_and_never_comes_out(asking):
    asking.submit("gone", "json_schema", MANY_OPTIONAL)
    wait_until(lambda: asking.probe.children())
    began = time.monotonic()
    asking.compiler.cancel("gone")
    wait_until(lambda: not asking.probe.children())
    assert time.monotonic() - began < 2.0
    assert asking.ask("choice", '["b"]').grammar and "gone" not in asking.taken


def test_what_is_cancelled_can_be_asked_for_again(asking):
    source = json.dumps({"enum": [f"once more {i}" for i in range(1000)]})
    for _ in range(5):
        asking.submit("again", "json_schema", source)
        asking.compiler.cancel("again")
    asking.submit("again", "json_schema", source)
    assert asking.wait("again").grammar


def test_a_process_that_was_killed_is_started_again(asking):
    before = asking.probe
    before.kill()
    assert asking.ask("choice", '["after the kill"]').grammar
    assert asking.probe.pid != before.pid


def test_a_process_that_hangs_is_replaced(asking, monkeypatch):
    monkeypatch.setattr("backend_lib.worker.grammar.prober._PATIENCE", 2.0)
    before = asking.probe
    before.suspend()
    assert asking.ask("choice", '["after the hang"]').grammar
    assert not before.is_running() and asking.probe.pid != before.pid


def wait_for_children(asking, known: set[psutil.Process]) -> set[psutil.Process]:
    """Of the process, that are not known yet."""
    wait_until(lambda: set(asking.probe.children()) - known)
    return set(asking.probe.children()) - known


def test_what_was_killed_while_it_was_tried_is_tried_again_and_never_refused_for_good(asking):
    source = 'root ::= "tried again" ' + EBNF_STARS.removeprefix("root ::= ")
    asking.submit("killed", "ebnf", source)
    (first,) = wait_for_children(asking, set())
    first.kill()
    (second,) = wait_for_children(asking, {first})
    second.kill()
    error = asking.wait("killed").error
    assert error == "the grammar cannot be used now: the process that tries grammars out was ended"
    assert asking.ask("ebnf", source).error == "the grammar cannot be used: it takes more than 5 s to compile"


def test_the_process_ends_with_its_worker():
    asking = Asking()
    assert asking.ask("json_object").grammar
    probe = asking.probe
    asking.compiler._tools.prober()._control.close()  # as the kernel does when a worker dies
    assert probe.wait(10) is not None or not probe.is_running()
    asking.compiler.close()


def test_the_cache_forgets_what_was_used_longest_ago():
    cache = ResultCache(3000)
    grammars = [Grammar(kind=GrammarKind.REGEX, source=f"{i}" * 400) for i in range(4)]
    no = Refusal("no")
    for grammar in grammars[:3]:
        cache.put(grammar, no)
    assert cache.get(grammars[0]) == no
    cache.put(grammars[3], no)
    assert [cache.get(each) for each in grammars] == [no, None, no, no]
    assert cache.num_bytes <= 3000
