"""Bytes of tokens, against the tokenizers' own texts and against xgrammar's reading of the same tokenizers."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from backend_lib.checkpoint import Checkpoint, HashConfig, open_checkpoint
from backend_lib.worker.grammar.vocabulary import Vocabulary
from tests.support.checkpoints import EOS, make_hash_checkpoint, make_tiny_gguf, make_tiny_llama

TEXTS = ['{"a": [1, 2.5e3, null]}', "naïve café 中文 👍", "two  spaces\n\ttab", "\x00\x1f", "<0x41>", "▁"]


def checkpoint_of(tokenizer: Tokenizer, vocab_size: int, *eos_token_ids: int) -> Checkpoint:
    config = HashConfig(architecture="test", vocab_size=vocab_size, max_position=64)
    return Checkpoint(name="test", config=config, tokenizer=tokenizer, eos_token_ids=eos_token_ids)


def sentencepiece() -> Tokenizer:
    """As Llama 2's: a mark for the space and pieces for bytes; here with an added token that is not special."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *'▁{}":abé', "▁a", "ab"]
    model = BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool▁>", normalized=False)])
    return tokenizer


def open_tiny(path) -> Checkpoint:
    return open_checkpoint(str(make_tiny_llama(path)))


def open_tiny_gguf(path) -> Checkpoint:
    path.mkdir()
    return open_checkpoint(str(make_tiny_gguf(path / "tiny.gguf")))


FAMILIES = {
    "smollm2": lambda path: open_checkpoint("smollm2"),
    "folder": open_tiny,
    "gguf": open_tiny_gguf,
    "sentencepiece": lambda path: checkpoint_of(sentencepiece(), 300, 2),
}


@pytest.fixture(params=FAMILIES)
def checkpoint(request, tmp_path):
    return FAMILIES[request.param](tmp_path / "checkpoint")


def test_the_tokens_of_a_text_are_its_bytes(checkpoint):
    tokens = Vocabulary.of(checkpoint).tokens
    for text in TEXTS:
        ids = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
        expected = " " if text == "▁" and "▁" in checkpoint.tokenizer.get_vocab() else text
        assert b"".join(tokens[i] for i in ids) == expected.encode()


def test_it_is_what_xgrammar_reads_from_transformers_tokenizer_but_for_special_tokens(checkpoint):
    import xgrammar
    from transformers import PreTrainedTokenizerFast

    ours = Vocabulary.of(checkpoint)
    size = checkpoint.config.vocab_size
    theirs = xgrammar.TokenizerInfo.from_huggingface(
        PreTrainedTokenizerFast(tokenizer_object=checkpoint.tokenizer),
        vocab_size=size,
        stop_token_ids=list(ours.stop_token_ids),
    )
    added = checkpoint.tokenizer.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    assert len(ours.tokens) == size == theirs.vocab_size
    assert all(ours.tokens[i] == b"" for i in special)
    plain = [i for i in range(size) if i not in added]
    decoded = theirs.decoded_vocab
    assert [ours.tokens[i] for i in plain] == [decoded[i] for i in plain]


def test_an_added_token_is_its_own_text():
    tokenizer = sentencepiece()
    tokens = Vocabulary.of(checkpoint_of(tokenizer, 300, 2)).tokens
    assert tokens[tokenizer.token_to_id("<tool▁>")] == "<tool▁>".encode()


def test_tokens_that_are_neither_bytes_nor_pieces_are_their_text(tmp_path):
    checkpoint = open_checkpoint(str(make_hash_checkpoint(tmp_path / "hash", vocab_size=64)))
    vocabulary = Vocabulary.of(checkpoint)
    assert vocabulary.tokens[5] == chr(0x4E05).encode() and vocabulary.stop_token_ids == (2,)


def test_logits_beyond_the_tokenizer_and_tokens_beyond_the_logits(tmp_path):
    tokenizer = sentencepiece()
    assert Vocabulary.of(checkpoint_of(tokenizer, 400, 2)).tokens[-1] == b""
    short = Vocabulary.of(checkpoint_of(tokenizer, 100, 2, 200))
    assert len(short.tokens) == 100 and short.stop_token_ids == (2,)


def test_it_crosses_to_the_other_process_unchanged():
    vocabulary = Vocabulary.of(checkpoint_of(sentencepiece(), 300, 2))
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


def test_the_end_of_sequence_stands_for_no_text(tmp_path):
    checkpoint = open_tiny(tmp_path / "tiny")
    vocabulary = Vocabulary.of(checkpoint)
    assert vocabulary.tokens[checkpoint.tokenizer.token_to_id(EOS)] == b""
