"""Stop strings are found wherever the text is cut, and nothing of them is shown before."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from backend_lib.checkpoint import open_checkpoint
from backend_lib.router.stop_strings import StopMatcher
from backend_lib.router.text import TextStream

# Few letters, so that stop strings overlap with the text, with each other and with themselves.
texts = st.text("abc", max_size=40)
stops = st.lists(st.text("abc", min_size=1, max_size=6), max_size=5).map(tuple)
cut_sizes = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def _naive_end(text, stop, first_end=1):
    """(start, end) of the stop string that ends first, at `first_end` or later; the longest of those."""
    for end in range(first_end, len(text) + 1):
        starts = [end - len(word) for word in stop if text[:end].endswith(word)]
        if starts:
            return min(starts), end
    return None


def _cuts(items, sizes):
    pieces, start = [], 0
    while start < len(items):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(items[start : start + size])
        start += size
    return pieces


def _run(matcher, pieces):
    shown = ""
    for piece in pieces:
        emit, matched = matcher.push(piece)
        shown += emit
        if matched:
            return shown, True
    return shown + matcher.flush(), False


@given(texts, stops, cut_sizes, st.booleans())
@example("xaab", ("ab", "aab"), [1], False)
@example("aaaab", ("aab",), [1], False)
@example("abcabd", ("abcabd", "cab"), [2], False)
@settings(max_examples=600, deadline=None)
def test_equals_a_search_of_the_whole_text(text, stop, sizes, include):
    match = _naive_end(text, stop)
    expected = text if match is None else text[: match[1] if include else match[0]]
    assert _run(StopMatcher(stop, include), _cuts(text, sizes)) == (expected, match is not None)


@given(texts, stops)
@settings(max_examples=300, deadline=None)
def test_holds_back_the_longest_possible_beginning_and_no_more(text, stop):
    matcher, shown = StopMatcher(stop), ""
    for count, char in enumerate(text, 1):
        emit, matched = matcher.push(char)
        if matched:
            return
        shown += emit
        held = max((k for word in stop for k in range(len(word)) if text[:count].endswith(word[:k])), default=0)
        assert shown == text[: count - held]


@pytest.mark.parametrize(
    ("stop", "pieces", "shown"),
    [
        (("ab", "aab"), ["xa", "a", "b"], "x"),
        (("aab", "ab"), ["xcab"], "xc"),
        (("\n\nUser:",), ["hello\n", "\nUs", "er", ": more"], "hello"),
        (("stop",), ["st", "st", "op"], "st"),
        (("é中",), ["caf", "é", "中"], "caf"),
        (("a",), ["a"], ""),
        (("one", "two", "three"), ["a tw", "othree"], "a "),
    ],
)
def test_examples(stop, pieces, shown):
    assert _run(StopMatcher(stop), pieces) == (shown, True)


def test_without_stop_strings_nothing_is_held():
    matcher = StopMatcher(())
    assert matcher.push("abc") == ("abc", False)
    assert matcher.flush() == ""


def test_a_piece_that_may_not_match_still_begins_one():
    matcher = StopMatcher(("abc", "b"))
    assert matcher.push("xab", may_match=False) == ("x", False)
    assert matcher.push("c") == ("", True)


def test_a_whole_stop_string_that_may_not_match_is_not_held():
    matcher = StopMatcher(("ab",))
    assert matcher.push("ab", may_match=False) == ("ab", False)
    assert matcher.push("ab") == ("", True)


def test_many_long_stop_strings_are_cheap():
    """Worst case for the beginnings: 64 stop strings of 1,024 characters that all almost match."""
    matcher = StopMatcher(tuple("a" * 1022 + chr(200 + i) + "b" for i in range(64)))
    before = time.thread_time()
    for _ in range(300):
        matcher.push("aaaa")
    matcher.push("c")
    assert time.thread_time() - before < 2


# TextStream: tokens, not characters


def _letters() -> Tokenizer:
    """One token per letter and a few of several, so that a stop string can end inside a token."""
    vocab = ["a", "b", "c", "ab", "bca", "cc", "<end>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


LETTERS = _letters()
token_lists = st.lists(st.integers(0, 6), max_size=40)


def _naive_stream(ids, stop, min_tokens):
    """(text, counted tokens, stopped) by decoding everything anew after each token."""
    before = len(LETTERS.decode(ids[:min_tokens]))
    for count in range(min_tokens + 1, len(ids) + 1):
        text = LETTERS.decode(ids[:count])
        match = _naive_end(text, stop, before + 1)
        if match:
            return text[: match[0]], count, True
    return LETTERS.decode(ids), len(ids), False


@given(token_lists, stops, st.integers(0, 10), cut_sizes)
@settings(max_examples=600, deadline=None)
def test_stream_counts_tokens_up_to_the_match(ids, stop, min_tokens, sizes):
    expected_text, expected_count, expected_stopped = _naive_stream(ids, stop, min_tokens)
    stream, text, count, stopped = TextStream(LETTERS, stop, min_tokens), "", 0, False
    for piece in _cuts(ids, sizes):
        delta = stream.push(piece)
        text, count, stopped = text + delta.text, count + delta.num_tokens, delta.stopped
    text += stream.finish()
    assert (text, count, stopped) == (expected_text, expected_count, expected_stopped)


def test_after_a_stop_nothing_comes():
    stream = TextStream(LETTERS, ("b",))
    assert stream.push([0, 1, 2, 2]) == ("a", 2, True)
    assert stream.push([0, 0]) == ("", 0, True)
    assert stream.finish() == ""


@given(st.lists(st.integers(0, 49151), max_size=60), cut_sizes)
@settings(max_examples=100, deadline=None)
def test_stream_without_stop_equals_decoding_at_once(ids, sizes):
    tokenizer = SMOLLM2
    stream = TextStream(tokenizer)
    text = "".join([stream.push(piece).text for piece in _cuts(ids, sizes)]) + stream.finish()
    assert text == tokenizer.decode(ids)


@given(
    st.text(st.sampled_from("aé中👍 \n."), max_size=30), st.text(st.sampled_from("aé中👍 \n."), min_size=1, max_size=3)
)
@settings(max_examples=200, deadline=None)
def test_stream_over_a_real_tokenizer(text, stop):
    ids = SMOLLM2.encode(text, add_special_tokens=False).ids
    stream = TextStream(SMOLLM2, (stop,))
    delta = stream.push(ids)
    assert delta.stopped == (stop in text)
    assert delta.text + stream.finish() == text.partition(stop)[0]


SMOLLM2 = open_checkpoint("smollm2").tokenizer
