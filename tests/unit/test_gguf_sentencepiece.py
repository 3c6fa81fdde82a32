"""SentencePiece tokenizers from GGUF metadata, against transformers' for the same pieces."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from backend_lib.checkpoint import open_checkpoint
from tests.support.checkpoints import make_tiny_gguf

TEXT = "the cat sat on the mat and then that other hat is not at the end of these lines"
TEXTS = [
    TEXT,
    "",
    "the",
    "a  double  space",
    "trailing ",
    "naïve café 中文 👍 \x00",
    "the\nthe\n\nthe",
    "x" * 40,
    "tttthhhhheeee",
    "<s>the</s>cat<s>",
    "<0x41> is text",
]
BOS_ID, EOS_ID, FIRST_BYTE = 1, 2, 3


def pieces() -> dict[str, float]:
    """Letters, and joints of neighbours in the text, best score first as SentencePiece's trainer gives them."""
    letters = sorted(set("▁" + TEXT.replace(" ", "") + ".,xyz"))
    joined = []
    for size in range(2, 7):
        text = "▁" + TEXT.replace(" ", "▁")
        joined += [text[i : i + size] for i in range(len(text) - size + 1) if "▁" not in text[i + 1 : i + size]]
    by_rank = sorted(set(joined), key=lambda piece: (-joined.count(piece), piece))
    return {piece: -float(rank) for rank, piece in enumerate([*by_rank, *letters])}


def vocabulary(*user_defined: str) -> dict[str, list]:
    """GGUF metadata."""
    scored = pieces()
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__tokens": ["<unk>", "<s>", "</s>", *byte_pieces, *scored, *user_defined],
        "tokenizer__ggml__scores": [0.0] * 259 + list(scored.values()) + [0.0] * len(user_defined),
        "tokenizer__ggml__token_type": [2, 3, 3] + [6] * 256 + [1] * len(scored) + [4] * len(user_defined),
        "tokenizer__ggml__bos_token_id": BOS_ID,
        "tokenizer__ggml__eos_token_id": EOS_ID,
        "tokenizer__ggml__pre": None,
        "tokenizer__ggml__merges": None,
        "llama__vocab_size": None,
    }


def ours(path: Path, *user_defined: str, **metadata) -> Tokenizer:
    return open_checkpoint(str(make_tiny_gguf(path / "spm.gguf", **(vocabulary(*user_defined) | metadata)))).tokenizer


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Tokenizer:
    return ours(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Tokenizer:
    return ours(tmp_path_factory.mktemp("gemma"), tokenizer__ggml__add_space_prefix=False)


def reference(class_name: str, **options):
    """transformers' tokenizer of the same pieces, its merges made by transformers."""
    import transformers
    from transformers.tokenization_utils_base import generate_merges

    tokens = vocabulary()["tokenizer__ggml__tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = generate_merges(ids, pieces())
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = getattr(transformers, class_name)(vocab=ids, merges=merges, **special, **options)
    return tokenizer


@pytest.fixture(scope="module")
def references() -> dict:
    return {
        "llama": reference("LlamaTokenizer", legacy=True, pad_token="</s>"),
        "gemma": reference("GemmaTokenizer", pad_token="</s>", mask_token="</s>"),
    }


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(kind: str, text: str, request, references) -> None:
    tokenizer, theirs = request.getfixturevalue(kind), references[kind]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert tokenizer.encode(text).ids == [BOS_ID, *ids]


@settings(max_examples=150, deadline=None)
@given(text=st.text(alphabet=st.sampled_from([*"thecaonsmd x.é中\n"]), max_size=40))
def test_any_text(llama: Tokenizer, gemma: Tokenizer, references, text: str) -> None:
    text = text.lstrip(" ")  # `Metaspace` of transformers adds no space to one; SentencePiece and llama.cpp do
    for name, tokenizer in (("llama", llama), ("gemma", gemma)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == references[name].encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text


def test_a_leading_space_is_kept(llama: Tokenizer, gemma: Tokenizer) -> None:
    assert llama.encode("  the", add_special_tokens=False).tokens == ["▁", "▁", "▁the"]
    assert gemma.encode(" the", add_special_tokens=False).tokens == ["▁the"]
    assert llama.decode(llama.encode("  the").ids) == "  the"


def test_what_no_piece_covers_is_written_in_bytes(llama: Tokenizer) -> None:
    assert llama.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert llama.decode([FIRST_BYTE + byte for byte in "é中".encode()]) == "é中"


def test_user_defined_tokens_are_found_in_the_text_as_it_is_written(tmp_path: Path) -> None:
    tokenizer = ours(tmp_path, "▁▁▁", "\n\n", "<tool>", tokenizer__ggml__add_space_prefix=False)
    last = tokenizer.get_vocab_size() - 1
    assert tokenizer.encode("the   the\n\n<tool>", add_special_tokens=False).ids[1:2] == [last - 2]
    ids = tokenizer.encode("the   the\n\n<tool>the", add_special_tokens=False).ids
    assert [i - last for i in ids if i > last - 3] == [-2, -1, 0]
    assert tokenizer.decode(ids) == "the   the\n\n<tool>the"


def test_control_tokens_are_found_and_left_out_of_text(llama: Tokenizer) -> None:
    ids = llama.encode("<s>the</s>").ids
    assert (ids[0], ids[1], ids[-1]) == (BOS_ID, BOS_ID, EOS_ID)
    assert llama.decode(ids) == "the"
