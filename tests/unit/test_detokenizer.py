"""Pieces of text join to the whole, whatever the tokenizer, the ids and the cuts."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backend_lib.checkpoint import open_checkpoint
from backend_lib.router.detokenizer import Detokenizer

TEXTS = [
    "The capital of France is Paris.",
    "  leading,   inner and trailing spaces  ",
    "naïve café “quotes” … Ελληνικά русский 中文字符 日本語 한국어 עברית العربية हिन्दी",
    "👩‍👩‍👧‍👦 🇫🇷 👍🏽 🏴󠁧󠁢󠁥󠁮󠁧󠁿 e\u0301\u0323 \u200d\ufeff",
    "a literal \ufffd here, \ufffd\ufffd\ufffd there, at the end \ufffd",
    "tabs\tand\r\nnew\n\n\nlines\x00nul",
    "<|im_start|>user\nhi<|im_end|>\n",
    "中" * 50 + "🎉" * 50 + "x",
]


@pytest.fixture(scope="module")
def bpe():
    """SmolLM2's tokenizer: byte-level BPE with special tokens."""
    return open_checkpoint("smollm2").tokenizer


def _byte_chars():
    """GPT-2's printable stand-in of each byte."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


BYTE_CHARS = _byte_chars()


def _byte_level() -> Tokenizer:
    """Byte-level BPE without merges: a token for each byte, with the byte as its id."""
    tokenizer = Tokenizer(models.BPE({char: byte for byte, char in enumerate(BYTE_CHARS)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = _byte_level()
WORDS = ["▁", "▁▁", "▁the", "▁cat", "s", "at", "▁é", "é", "中", "\ufffd", "👍", ".", "▁.", "a", "▁a", "\n"]


def _sentencepiece(decoder) -> Tokenizer:
    """A small SentencePiece-like model: words that begin with ▁, and 256 byte tokens for the rest."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    return tokenizer


LLAMA = _sentencepiece(
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
)
METASPACE = _sentencepiece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))
SENTENCEPIECE = {"llama": LLAMA, "metaspace": METASPACE}
BYTE_0, WORD_0 = 3, 3 + 256


def _cuts(ids, sizes):
    """The ids in pieces of the given sizes, repeated."""
    pieces, start = [], 0
    while start < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(ids[start : start + size])
        start += size
    return pieces


def _join(tokenizer, ids, sizes=(1,), **options):
    detokenizer = Detokenizer(tokenizer, **options)
    return "".join([detokenizer.push(piece) for piece in _cuts(ids, sizes)]) + detokenizer.flush()


cut_sizes = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_texts(bpe, text, skip_special_tokens):
    ids = bpe.encode(text, add_special_tokens=False).ids
    whole = bpe.decode(ids, skip_special_tokens=skip_special_tokens)
    assert _join(bpe, ids, skip_special_tokens=skip_special_tokens) == whole


@given(st.lists(st.integers(0, 49151), max_size=120), cut_sizes)
@settings(max_examples=150, deadline=None)
def test_random_ids(bpe, ids, sizes):
    assert _join(bpe, ids, sizes) == bpe.decode(ids)


@given(st.text(max_size=60), cut_sizes)
@settings(max_examples=100, deadline=None)
def test_any_text(bpe, text, sizes):
    ids = bpe.encode(text, add_special_tokens=False).ids
    assert _join(bpe, ids, sizes) == bpe.decode(ids)


PARTS = [b"\xf0\x9f\x98\x80", b"\xe2\x82\xac", b"\xc3\xa9", b"\xe2\x82", b"\xf0\x9f", b"\x80", b"a", b"\xff"]


@given(st.one_of(st.binary(max_size=150), st.lists(st.sampled_from(PARTS), max_size=60).map(b"".join)), cut_sizes)
@example(b"a\xe2" * 100, [1])
@example(b"\x80" * 200 + b"\xe2\x82\xac", [1])
@example(b"\xf0\x9f\x98" * 60 + b"\x80", [1])
@example("\ufffd".encode() * 100, [1])
@settings(max_examples=300, deadline=None)
def test_broken_bytes(data, sizes):
    """Tokens of one byte each: what is no character becomes U+FFFD exactly as when decoded at once."""
    ids = list(data)
    assert _join(BYTES, ids, sizes) == BYTES.decode(ids) == data.decode(errors="replace")


@pytest.mark.parametrize("text", TEXTS)
def test_every_piece_is_whole_and_nothing_waits_without_need(bpe, text):
    ids = bpe.encode(text, add_special_tokens=False).ids
    detokenizer, so_far = Detokenizer(bpe), ""
    for count, token_id in enumerate(ids, 1):
        so_far += detokenizer.push([token_id])
        assert so_far == bpe.decode(ids[:count]).rstrip("\ufffd")


valid_runs = st.sampled_from(["é", "中", "👍", "€", "z"]).map(lambda char: [BYTE_0 + byte for byte in char.encode()])
word_ids = st.integers(WORD_0, WORD_0 + len(WORDS) - 1).map(lambda token_id: [token_id])
silent_ids = st.sampled_from([[0], [1], [2], [99_999]])


@pytest.mark.parametrize("name", SENTENCEPIECE)
@given(st.lists(st.one_of(valid_runs, word_ids, word_ids, silent_ids), max_size=60), cut_sizes)
@example([[BYTE_0 + byte for byte in "👍".encode()]] * 30, [1])
@example([[BYTE_0 + byte for byte in "中".encode()]] * 40, [40])
@settings(max_examples=150, deadline=None)
def test_sentencepiece(name, parts, sizes):
    tokenizer, ids = SENTENCEPIECE[name], [token_id for part in parts for token_id in part]
    assert _join(tokenizer, ids, sizes) == tokenizer.decode(ids)


@given(st.lists(st.integers(BYTE_0, BYTE_0 + 255), min_size=1, max_size=100))
@settings(max_examples=100, deadline=None)
def test_a_broken_byte_fallback_run_spoils_nothing_after_it(run):
    """The documented exception: inside the run the pieces may differ from the whole. What follows may not."""
    ids = [*run, *(WORD_0 + WORDS.index(word) for word in ("▁the", "▁cat"))]
    assert _join(LLAMA, ids).endswith(" the cat")


@pytest.mark.parametrize("token_ids", [[2], [49_151 + 1000], [0, 1, 2]])
def test_tokens_without_text(bpe, token_ids):
    detokenizer = Detokenizer(bpe)
    assert detokenizer.push(token_ids * 100) == ""
    assert detokenizer.push(bpe.encode("é").ids) == "é"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder("</w>")])
def test_other_decoders(decoder):
    vocab = ["a", "##b", "c</w>", "d</w>", ".", "[UNK]"]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocab)}, unk_token="[UNK]"))
    if decoder:
        tokenizer.decoder = decoder
    ids = [0, 1, 2, 3, 4] * 12
    assert _join(tokenizer, ids) == tokenizer.decode(ids)


STREAMS = {
    "text": lambda tokenizer, count: (tokenizer.encode(TEXTS[2] * 60, add_special_tokens=False).ids * 2)[:count],
    "special": lambda tokenizer, count: [2] * count,
    "broken": lambda tokenizer, count: [tokenizer.token_to_id(BYTE_CHARS[0xE2])] * count,
    "never whole": lambda tokenizer, count: (
        [tokenizer.token_to_id(char) for char in ("a", BYTE_CHARS[0xE2])] * (count // 2)
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_work_per_token_does_not_grow(bpe, name):
    """The window that is decoded again stays short, whatever the tokens."""
    detokenizer = Detokenizer(bpe)
    for token_id in STREAMS[name](bpe, 3000):
        detokenizer.push([token_id])
        assert len(detokenizer._window) <= 64


def _continued(tokenizer, prompt_ids, ids, sizes=(1,)):
    detokenizer = Detokenizer(tokenizer, prompt_ids=prompt_ids)
    return "".join([detokenizer.push(piece) for piece in _cuts(ids, sizes)]) + detokenizer.flush()


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_the_first_space_of_a_continuation_stays(name):
    the, cat = (WORD_0 + WORDS.index(word) for word in ("▁the", "▁cat"))
    assert _continued(SENTENCEPIECE[name], [1, the], [cat, the]) == " cat the"
    assert _continued(SENTENCEPIECE[name], [1], [cat, the]) == "cat the"
    assert _continued(SENTENCEPIECE[name], [the, 1, 2], [cat]) == " cat"


parts = st.lists(st.one_of(valid_runs, word_ids, word_ids, silent_ids), max_size=30)


@pytest.mark.parametrize("name", SENTENCEPIECE)
@given(parts, parts, cut_sizes)
@example([[BYTE_0 + byte for byte in "中".encode()]] * 20, [[BYTE_0 + byte for byte in "中".encode()]] * 20, [1])
@example([[BYTE_0 + byte for byte in "👍".encode()]] * 20, [[BYTE_0 + byte for byte in "é".encode()]] * 9, [4])
@example([[WORD_0 + WORDS.index("\ufffd")]], [[WORD_0]], [1])
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_what_decoding_adds_to_the_prompt(name, prompt_parts, parts, sizes):
    tokenizer = SENTENCEPIECE[name]
    prompt_ids, ids = ([token_id for part in each for token_id in part] for each in (prompt_parts, parts))
    added = tokenizer.decode(prompt_ids + ids)[len(tokenizer.decode(prompt_ids)) :]
    assert _continued(tokenizer, prompt_ids, ids, sizes) == added


@given(st.text(max_size=40), st.text(max_size=40), cut_sizes)
@example("\ufffd", "\ufffd", [1])
@example("中" * 40, "文", [1])
@settings(max_examples=150, deadline=None)
def test_any_text_goes_on_from_any_prompt(bpe, prompt, text, sizes):
    prompt_ids, ids = (bpe.encode(each, add_special_tokens=False).ids for each in (prompt, text))
    assert _continued(bpe, prompt_ids, ids, sizes) == bpe.decode(ids)


def test_flush_of_half_a_character():
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push(b"a\xf0\x9f") == "a"
    assert detokenizer.flush() == "\ufffd"
    assert Detokenizer(BYTES).flush() == ""
