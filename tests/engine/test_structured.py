"""Output that matches a grammar, through router and worker, beside requests that have none."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from backend_lib.router.reply import ErrorKind
from backend_lib.router.router import Router
from tests.support.checkpoints import make_tiny_llama, tiny_tokenizer
from tests.support.engine import Ask, assert_level, running_router, wait_until, worker_pid

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
DIGITS = "[0-9]{3}-[0-9]{4}"
CHOICES = ["north", "north-east", "über"]
EBNF = 'root ::= "<" [ab]+ ">"'
AMBIGUOUS = 'root ::= s s s s "b"\ns ::= s s | "a" | "aa" | "aaa" | "a" s "a"'  # endless where there is no b
FIELDS = {"exclude_input_in_output": True, "temperature": 1.5, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("llama"))


def ask(seed: int, **fields: Any) -> Ask:
    return Ask([], FIELDS | {"seed": seed, "stream": seed % 2 == 0} | fields, text="the rain in the north")


def matches(ask: Ask) -> bool:
    """Whether the whole answer is what was asked for."""
    text = ask.sender.text
    if "guided_json" in ask.parameters:
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if "guided_regex" in ask.parameters:
        return bool(re.fullmatch(DIGITS, text))
    if "guided_choice" in ask.parameters:
        return text in CHOICES
    if "guided_grammar" in ask.parameters:
        return bool(re.fullmatch("<[ab]+>", text))
    return True


def constrained(seed: int) -> Ask:
    kinds = [
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_regex": DIGITS},
        {"guided_choice": json.dumps(CHOICES)},
        {"guided_grammar": EBNF},
        {"max_tokens": 30},
    ]
    return ask(seed, **kinds[seed % len(kinds)])


@pytest.fixture(scope="module")
def router(folder) -> Iterator[Router]:
    with running_router(folder, weights="fp32", max_running=12, kv_tokens=1200, overlap="on") as running:
        first = ask(0, guided_regex="[ab]")
        running.submit(first.inbound())
        assert first.sender.wait(60).error is None  # what is loaded for the first grammar of all is there now
        yield running


def check_mixture(router: Router) -> None:
    asks = [constrained(seed) for seed in range(30)]
    for each in asks:
        router.submit(each.inbound())
    for each in asks:
        sender = each.sender.wait(60)
        assert sender.error is None, sender.error
        assert sender.finish.text in ("stop", "length")
        assert sender.finish.text == "length" or matches(each), sender.text
    assert sum(each.sender.finish.text == "stop" for each in asks) > 20
    assert_level(router)


def test_constrained_rows_beside_others(router) -> None:
    check_mixture(router)


def test_constrained_rows_beside_others_without_overlap(folder) -> None:
    with running_router(folder, overlap="off", max_running=12, kv_tokens=1200) as router:
        check_mixture(router)


def test_a_grammar_goes_on_in_another_worker(router) -> None:
    """The undisturbed answers, and those of a worker that is killed midway."""
    answers = []
    for is_killed in (False, True):
        asks = [ask(seed, guided_regex="[a-z ]{80}") for seed in range(8)]
        for each in asks:
            router.submit(each.inbound())
        if is_killed:
            wait_until(lambda asks=asks: asks[0].sender.num_tokens > 5)
            os.kill(worker_pid(router), signal.SIGKILL)
        answers.append([each.sender.wait(60).text for each in asks])
    assert_level(router)
    assert answers[0] == answers[1]
    assert all(re.fullmatch("[a-z ]{80}", text) for text in answers[0])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_regex": "(unclosed"}, "regular expression"),
        ({"guided_grammar": "root ::= nothing"}, "grammar"),
        ({"guided_json": {"type": "no such type"}}, "JSON schema"),
    ],
)
def test_a_grammar_that_is_none_is_the_clients_mistake_within_a_second(router, fields, words: str) -> None:
    other = ask(1, max_tokens=60, temperature=0)
    wrong = ask(0, **fields)
    router.submit(other.inbound())
    started = time.monotonic()
    router.submit(wrong.inbound())
    kind, text = wrong.sender.wait(10).error
    (field,) = fields
    assert kind is ErrorKind.INVALID_ARG and text.startswith(
        f"'{field}' cannot be kept to: the {words} cannot be used: "
    )
    assert time.monotonic() - started < 1
    assert other.sender.wait(30).error is None
    assert_level(router)


def test_what_takes_long_to_compile_holds_nobody_up(router) -> None:
    """Optional properties take time that grows with the square of their number."""
    schema = {"type": "object", "properties": {f"{number:x}": {} for number in range(900)}}
    heavy = ask(0, guided_json=json.dumps(schema), max_tokens=5)
    router.submit(heavy.inbound())
    gone = ask(2, guided_json=json.dumps(schema | {"title": "another"}))
    router.submit(gone.inbound())
    gone.sender.cancelled = True
    others = [ask(seed, max_tokens=9) for seed in range(6)]
    for each in others:
        router.submit(each.inbound())
    assert gone.sender.wait(5).error[0] is ErrorKind.CANCELLED
    for each in others:
        assert each.sender.wait(30).error is None
    assert not heavy.sender.done.is_set()
    assert heavy.sender.wait(30).error is None and heavy.sender.text.startswith("{")
    assert_level(router)


def test_a_grammar_that_is_slow_to_follow_ends_alone_also_after_a_death(router) -> None:
    """Others go on; and no worker is ended as one that hangs, for what it would have to follow anew."""
    letter_a = tiny_tokenizer().encode("a").ids
    slow = [ask(seed, guided_grammar=AMBIGUOUS, allowed_token_ids=letter_a, max_tokens=200) for seed in range(12)]
    other = ask(1, max_tokens=190, temperature=0)
    before = router._arena.epoch(0)
    for each in (*slow, other):
        router.submit(each.inbound())
    wait_until(lambda: other.sender.num_tokens > 20)
    os.kill(worker_pid(router), signal.SIGKILL)
    assert other.sender.wait(60).error is None
    for each in slow:
        kind, text = each.sender.wait(60).error
        assert kind in (ErrorKind.INTERNAL, ErrorKind.INVALID_ARG) and "too long to follow" in text
    assert router._arena.epoch(0) == before + 1
    assert_level(router)


def test_what_contradicts_its_own_grammar_ends_in_words(router) -> None:
    each = ask(0, guided_regex="[0-9]{3}", allowed_token_ids=[100, 101])
    router.submit(each.inbound())
    kind, text = each.sender.wait(30).error
    assert kind is ErrorKind.INTERNAL and "no token is allowed" in text
    assert_level(router)
