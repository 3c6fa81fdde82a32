"""Grammars and masks: what is allowed, by brute force and by random walks under the masks."""

import json
import random
import re
import subprocess
import sys
import time

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.request import Grammar, GrammarKind
from backend_lib.worker.grammar import CompiledGrammar, GrammarState, apply_masks, mask_width
from backend_lib.worker.grammar.builder import Builder
from backend_lib.worker.grammar.mask import mask_of, token_ids_of
from backend_lib.worker.grammar.vocabulary import Vocabulary

EOS = 1
WORDS = [b'{"', b'":', b'", "', b'"}', b"},", b"true", b"null", b"12", b"ab", "é".encode(), "éx".encode(), b"\xa9}"]
BYTES = Vocabulary((b"", b"", *(bytes([byte]) for byte in range(256)), *WORDS), (EOS,))
# Nothing shorter than a character, as where every character has a piece.
PIECES = Vocabulary((b"", b"", *(c.encode() for c in map(chr, [*range(32, 127), 0xE9])), *WORDS[:11]), (EOS,))
VOCABULARIES = {"bytes": BYTES, "pieces": PIECES}
_BUILDERS = {id(each): Builder(each) for each in VOCABULARIES.values()}


def build(kind: str, source: str = "", vocabulary: Vocabulary = BYTES) -> CompiledGrammar:
    return _BUILDERS[id(vocabulary)].build(Grammar(kind=GrammarKind(kind), source=source))


def next_ids(state: GrammarState, vocabulary: Vocabulary = BYTES) -> list[int]:
    mask = np.empty(mask_width(len(vocabulary.tokens)), dtype=np.int32)
    state.fill(mask)
    return token_ids_of(mask)


def text_of(ids: list[int], vocabulary: Vocabulary = BYTES) -> str:
    return b"".join(vocabulary.tokens[i] for i in ids).decode()


def walk(grammar: CompiledGrammar, rng: random.Random, vocabulary: Vocabulary = BYTES, steps: int = 400) -> str | None:
    """A text drawn with random weights under the masks, or None when it did not come to an end."""
    state, ids = GrammarState(grammar), []
    while len(ids) < steps and not state.is_over:
        allowed = next_ids(state, vocabulary)
        token_id = rng.choices(allowed, [weight(vocabulary.tokens[i], len(ids)) for i in allowed])[0]
        assert state.accept(token_id)
        if token_id == EOS:
            break
        ids.append(token_id)
    return text_of(ids, vocabulary) if state.is_over or EOS in next_ids(state, vocabulary) else None


def weight(token: bytes, length: int) -> float:
    """So that texts end: blanks, escapes and stray bytes are rare, and late in a text closing marks are frequent."""
    if token in (b'"', b"}", b"]", b'"}') and length > 40:
        return 20
    return 0.02 if token[:1] in (b" ", b"\n", b"\r", b"\t", b"\\") else 1 if token.isascii() else 0.05


# Brute force: a token is allowed when the text after it is the beginning of a match.

CHOICES = ["yes", "no", "é", 'no"t', "12{", "a\\b\n", "👍"]


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_a_mask_allows_exactly_the_tokens_that_may_follow(vocabulary):
    choices = [c for c in CHOICES if vocabulary is BYTES or all(c.encode() in vocabulary.tokens for c in c)]
    grammar, seen = build("choice", json.dumps(choices), vocabulary), [b""]
    beginnings = {each.encode()[:end] for each in choices for end in range(len(each.encode()) + 1)}
    for text in seen:
        state = state_after(grammar, text, vocabulary)
        expected = {i for i, token in enumerate(vocabulary.tokens) if token and text + token in beginnings} | (
            {EOS} if text.decode(errors="ignore").encode() == text and text.decode() in choices else set()
        )
        assert set(next_ids(state, vocabulary)) == expected, text
        seen += [text + vocabulary.tokens[i] for i in expected - {EOS} if text + vocabulary.tokens[i] not in seen]
    assert {each.encode() for each in choices} <= set(seen)


def state_after(grammar: CompiledGrammar, text: bytes, vocabulary: Vocabulary) -> GrammarState:
    """By the longest tokens that fit, as a tokenizer might."""
    ids = []
    while text:
        token = max((token for token in vocabulary.tokens if token and text.startswith(token)), key=len)
        ids.append(vocabulary.tokens.index(token))
        text = text[len(token) :]
    return GrammarState(grammar, ids)


def test_what_is_accepted_is_what_the_mask_allows():
    grammar = build("json_schema", '{"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}')
    ids = [2 + byte for byte in '{"é":1'.encode()]
    for end, _ in enumerate(ids):
        allowed = set(next_ids(GrammarState(grammar, ids[:end])))
        for token_id in range(-1, len(BYTES.tokens) + 1):
            assert GrammarState(grammar, ids[:end]).accept(token_id) == (token_id in allowed)


def test_the_end_is_allowed_exactly_where_a_match_ends():
    state = GrammarState(build("regex", "a{2,4}"))
    ends = []
    for _ in range(4):
        ends.append(EOS in next_ids(state))
        assert not state.is_over
        assert state.accept(2 + ord("a"))
    assert ends == [False, False, True, True] and state.is_over and next_ids(state) == [EOS]
    assert state.accept(EOS) and state.is_over and next_ids(state) == [EOS] and not state.accept(EOS)


def test_a_vocabulary_without_an_end_is_over_all_the_same():
    vocabulary = Vocabulary(BYTES.tokens, ())
    state = GrammarState(Builder(vocabulary).build(Grammar(kind=GrammarKind.CHOICE, source='["a", "ab"]')))
    assert state.accept(2 + ord("a")) and not state.is_over and next_ids(state) == [2 + ord("b")]
    assert state.accept(2 + ord("b")) and state.is_over and not state.is_stuck and next_ids(state) == []


def test_a_text_that_the_vocabulary_cannot_finish_is_stuck():
    vocabulary = Vocabulary((b"", b"", b"a", b"b"), (EOS,))
    builder = Builder(vocabulary)
    state = GrammarState(builder.build(Grammar(kind=GrammarKind.CHOICE, source='["ac"]')))
    assert not state.is_stuck and state.accept(2) and state.is_stuck and not state.is_over
    with pytest.raises(ValueError, match="no token of this model can begin"):
        builder.build(Grammar(kind=GrammarKind.CHOICE, source='["ca"]'))


def test_a_grammar_whose_readings_multiply_is_called_too_slow():
    grammar = build("ebnf", 'root ::= root root | "a" | ""')
    state = GrammarState(grammar)
    length = 0
    while not state.is_too_slow:
        next_ids(state)
        assert state.accept(2 + ord("a"))
        length += 1
        assert length < 4000
    with pytest.raises(ValueError, match="takes too long to follow"):  # not even when another worker goes on with it
        GrammarState(grammar, [2 + ord("a")] * 4 * length)
    assert not GrammarState(build("json_object")).is_too_slow


def test_a_resumed_sequence_stands_where_an_undisturbed_one_does():
    rng, grammar = random.Random(5), build("json_object")
    state, ids = GrammarState(grammar), []
    for _ in range(60):
        resumed = GrammarState(grammar, np.array(ids, dtype=np.int32))
        assert next_ids(resumed) == next_ids(state) and resumed.is_over == state.is_over
        if state.is_over:
            break
        ids.append(rng.choice(next_ids(state)))
        assert state.accept(ids[-1])
    with pytest.raises(ValueError, match="does not allow the output's token 7"):
        GrammarState(grammar, [7])


# Random walks: whatever the logits, the text matches.

SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "string"}, "é\n": {"type": "number"}}, "required": ["é\n"]},
    {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 4},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": r'^[ -~]{1,5}"\\$'},
    {"type": "string", "pattern": r"^.[^a]\S\W\D$"},
    {"type": "object", "required": ["x", "y z"], "additionalProperties": {"type": "integer", "minimum": -3}},
    {"type": ["integer", "null"], "exclusiveMaximum": 7},
    {"enum": ['"', "\\", 1, None, {"a": [True]}, "\x01"]},
    {"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"const": 1}}, "additionalProperties": False},
    {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {
            name: {"type": "object", "properties": {"kind": {"const": name}, name: {}}, "required": ["kind"]}
            for name in "ab"
        },
    },
]


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_walks_under_a_schema_give_json_that_is_valid(schema, vocabulary):
    if vocabulary is PIECES and "\x01" in json.dumps(schema, ensure_ascii=False):
        pytest.skip("no piece for it")
    grammar, rng = build("json_schema", json.dumps(schema), vocabulary), random.Random(1)
    texts = [text for _ in range(25) if (text := walk(grammar, rng, vocabulary))]
    assert len(texts) > 15
    for text in texts:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_walks_without_a_schema_give_objects(vocabulary):
    grammar, rng = build("json_object", "", vocabulary), random.Random(2)
    texts = [text for _ in range(40) if (text := walk(grammar, rng, vocabulary))]
    assert len(texts) > 20 and all(isinstance(json.loads(text), dict) for text in texts)


@pytest.mark.parametrize(
    "regex",
    [r"(a|é)+b?", r"[^a-y\s]{2}.", r"^\d{3}-\w*$", r"x|^y$|", r"(?:👍|\\|\")+?z", r"\W\S\D[^\d]", r"[\]\-^]+", ""],
)
def test_walks_under_a_regex_match_in_full(regex):
    grammar, rng = build("regex", regex), random.Random(3)
    texts = [text for _ in range(40) if (text := walk(grammar, rng)) is not None]
    assert len(texts) > 30 and all(re.fullmatch(regex, text) for text in texts)


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_choice_is_one_of_them_to_the_letter(choices, seed):
    assert walk(build("choice", json.dumps(choices)), random.Random(seed)) in choices


def test_ebnf():
    grammar, rng = build("ebnf", 'root ::= item ("," item)*\nitem ::= "[" root "]" | [0-9]'), random.Random(4)
    texts = [text for _ in range(40) if (text := walk(grammar, rng))]
    assert texts and all(json.loads(f"[{text}]") for text in texts)


@pytest.mark.parametrize("schema", [{"minLength": 2}, {"maxLength": 40}, {"maxLength": 5000}, {}], ids=json.dumps)
def test_masks_inside_a_string_are_computed_ahead(schema):
    """A mask that is not takes a thousand times as long as one that is, so that no machine's noise hides it."""
    tokens = (*BYTES.tokens, *(f"{a:x} {b:x}".encode() for a in range(100) for b in range(400)))
    source = json.dumps({"type": "string"} | schema)
    compiled = Builder(Vocabulary(tokens, (EOS,))).build(Grammar(kind=GrammarKind.JSON_SCHEMA, source=source))
    mask, times = np.empty(mask_width(len(tokens)), dtype=np.int32), []
    for _ in range(10):
        state = GrammarState(compiled, [2 + ord('"'), 2 + ord("a"), 2 + ord("b")])
        began = time.perf_counter()
        state.fill(mask)
        times.append(time.perf_counter() - began)
    assert min(times) < 1e-3


# Masks on logits.


@pytest.mark.parametrize("vocab_size", [5, 64, 269, 1000])
def test_masks_leave_what_is_allowed_and_nothing_else(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size), dtype=np.float32))
    allowed = [np.flatnonzero(rng.random(vocab_size) < share) for share in (0, 0.1, 1)]
    masks = np.stack([mask_of(ids.tolist(), vocab_size) for ids in allowed])
    expected = logits.clone()
    for place, ids in zip((4, 0, 2), allowed, strict=True):
        expected[place] = -torch.inf
        expected[place, ids] = logits[place, ids]
    apply_masks(logits, [4, 0, 2], masks)
    assert torch.equal(logits, expected)


def test_a_mask_is_written_into_numpy_and_torch_alike():
    state = GrammarState(build("json_object"))
    row = torch.zeros((2, mask_width(len(BYTES.tokens))), dtype=torch.int32)
    state.fill(row[1])
    assert token_ids_of(row[1].numpy()) == next_ids(state) and not row[0].any()


# What is refused.

REFUSED = [
    ("json_schema", '{"type":', "Expecting value"),
    ("json_schema", '{"type": "strin"}', 'Unsupported type "strin"'),
    ("json_schema", "[1]", r"\[1\] is not a schema"),
    ("json_schema", '{"properties": {"a": 5}}', "5 is not a schema"),
    ("json_schema", '{"type": "array", "uniqueItems": true}', "'uniqueItems' is not supported"),
    ("json_schema", '{"allOf": [{"minimum": 1}, {"maximum": 2}]}', "'allOf' of more than one"),
    ("json_schema", '{"oneOf": [{"minimum": 1}, {"type": "integer"}]}', "'oneOf' whose schemas are not told apart"),
    ("json_schema", '{"$ref": "http://a/b"}', "'#'"),
    ("json_schema", '{"$ref": "#/a"}', "leads nowhere"),
    ("json_schema", '{"type": "string", "pattern": "a", "minLength": 2}', "'pattern' beside 'minLength'"),
    ("json_schema", '{"type": "string", "minimum": 2}', "'minimum' is not supported beside 'type'"),
    ("json_schema", '{"minimum": 2, "minLength": 2}', "needs a 'type'"),
    ("json_schema", '{"required": ["a"], "additionalProperties": false}', "'required' has \"a\""),
    ("json_schema", '{"type": "string", "pattern": "(?=a)"}', "look-around"),
    ("json_schema", "false", "cannot accept any value"),
    ("regex", "(a", "unterminated"),
    ("regex", r"(a)\1", "back-reference"),
    ("regex", r"\bword", "anchor in the middle"),
    ("regex", "a$b", "anchor in the middle"),
    ("regex", "(?i)a", "flags"),
    ("regex", "(" * 3000 + ")" * 3000, "nested too deeply"),
    ("ebnf", "root ::= other", '"other" is not defined'),
    ("ebnf", "", "root"),
    ("choice", "[]", "one or more strings"),
    ("choice", '["a", 1]', "one or more strings"),
    ("choice", '["\\ud800"]', "surrogates"),
    ("regex", "a" * 300_000, "300000 bytes"),
]


@pytest.mark.parametrize(("kind", "source", "words"), REFUSED, ids=[f"{r[0]} {r[1][:30]}" for r in REFUSED])
def test_what_cannot_be_kept_to_is_refused_in_words(kind, source, words):
    with pytest.raises(ValueError, match=words) as error:
        build(kind, source)
    assert len(str(error.value)) <= 160 and str(error.value).isprintable()


def test_only_a_grammar_imports_xgrammar():
    code = "import sys, backend_lib.worker.grammar, backend_lib.worker.engine; print('xgrammar' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
