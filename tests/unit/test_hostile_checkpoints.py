"""Checkpoints that are cut or lie: each is an error in words that names it, at the price of a good file of its size."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoints import TINY_VOCAB, make_hash_checkpoint, make_tiny_gguf
from tests.support.families import VARIANTS, make_variant
from tests.support.gguf_families import convert
from tests.support.hostile import Opener, gguf_boundaries, mutate_file, openers, refusal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return make_variant(tmp_path_factory.mktemp("good") / "llama", "llama")


@pytest.fixture(scope="module")
def sides(good: Path) -> Iterator[list[Opener]]:
    with openers(good) as both:
        yield both


def complaint(sides: list[Opener], model: Path) -> str:
    """What is wrong with how `model` is opened; "" when it is opened, or refused as it should be."""
    for side in sides:
        outcome = side.open(model)
        named = model.name in outcome.text and len(outcome.text) < 2000
        if not outcome.is_allowed or (outcome.error and not named):
            return f"{outcome.error}: {outcome.text[:300]}"
    return ""


def fuzz(sides: list[Opener], base: Path, count: int, seed: int, folder: Path) -> list[str]:
    """Complaints about `count` mutations of a checkpoint, each of one of its files."""
    work = folder / f"fuzzed{base.suffix}"
    shutil.copytree(base, work) if base.is_dir() else shutil.copy(base, work)
    files = sorted(base.iterdir()) if base.is_dir() else [base]
    boundaries = gguf_boundaries(base) if base.suffix == ".gguf" else []
    found = []
    for number in range(count):
        generator = random.Random(f"{seed} {number}")
        file = generator.choice(files)
        target = work / file.name if base.is_dir() else work
        target.write_bytes(mutate_file(file, boundaries, generator))
        if words := complaint(sides, work):
            found.append(f"{base.name}, {file.name}, seed {seed} {number}: {words}")
        target.write_bytes(file.read_bytes())
    return found


def make_base(path: Path, variant: str, kind: str) -> Path:
    if variant == "hash":
        return make_hash_checkpoint(path / "hash")
    folder = make_variant(path / variant, variant, shard_size="1GB" if kind == "gguf" else "300KB")
    return convert(folder, path / f"{variant}.gguf") if kind == "gguf" else folder


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("llama", "gguf"),
        ("mixtral", "gguf"),
        ("qwen3, yarn, tied", "folder"),
        ("phi4-mini, long", "folder"),
        ("hash", ""),
    ],
)
def test_mutations(variant: str, kind: str, sides, tmp_path: Path) -> None:
    assert fuzz(sides, make_base(tmp_path, variant, kind), 80, 0, tmp_path) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gguf", "folder"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_mutations(variant: str, kind: str, sides, tmp_path: Path) -> None:
    assert fuzz(sides, make_base(tmp_path, variant, kind), 700, 1, tmp_path) == []


# GGUF, a lie at a time. They are told before a tensor is read, so the router refuses them too.


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little")


def text(words: str) -> bytes:
    return number(len(words)) + words.encode()


def after(content: bytes, marker: bytes, new: bytes, skip: int = 0) -> bytes:
    """`new` written over what stands `skip` bytes behind the marker."""
    at = content.index(marker) + len(marker) + skip
    return content[:at] + new + content[at + len(new) :]


TOKENS = text("tokenizer.ggml.tokens") + number(9, 4)
MODEL = text("tokenizer.ggml.model")
EMBEDDING = text("token_embd.weight")
GGUF_LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a pickle": (lambda c: b"PK\3\4" + c[4:], "does not begin with 'GGUF'"),
    "a version of the past": (lambda c: c[:4] + number(1, 4) + c[8:], "version 1"),
    "a version to come": (lambda c: c[:4] + number(4, 4) + c[8:], "version 4"),
    "more tensors than bytes": (lambda c: c[:8] + number(1 << 63) + c[16:], f"{1 << 63} tensors; supported are"),
    "more keys than bytes": (lambda c: c[:16] + number(1 << 63) + c[24:], f"{1 << 63} keys; supported are at most"),
    "one tensor too many": (lambda c: c[:8] + number(3) + c[16:], "not a whole GGUF file"),
    "one key too many": (lambda c: c[:16] + number(c[16] + 1) + c[24:], "not a whole GGUF file"),
    "an endless key": (lambda c: c[:24] + number(1 << 62) + c[32:], f"a text of {1 << 62} bytes at byte 24"),
    "an endless array": (lambda c: after(c, TOKENS, number(1 << 62), 4), "it ends too early"),
    "an array of arrays": (lambda c: after(c, TOKENS, number(9, 4)), "an array of arrays"),
    "an unknown kind of array": (lambda c: after(c, TOKENS, number(77, 4)), "77 is not a valid GGUFValueType"),
    "the same key twice": (lambda c: c.replace(b"ggml.bos_token", b"ggml.eos_token"), "Duplicate tokenizer.ggml.eos"),
    "a key that is no text": (lambda c: c.replace(b"llama.block_count", b"llama.block\xffcount"), "utf-8"),
    "a value that is no text": (lambda c: after(c, MODEL, b"\xff", 12), "'tokenizer.ggml.model' is not UTF-8"),
    "no dimensions": (lambda c: after(c, EMBEDDING, number(0, 4)), "has 0 dimensions"),
    "five dimensions": (lambda c: after(c, EMBEDDING, number(5, 4)), "has 5 dimensions"),
    "endless dimensions": (lambda c: after(c, EMBEDDING, number((1 << 32) - 1, 4)), "it ends too early"),
    "a product that wraps to 0": (lambda c: after(c, EMBEDDING, number(1 << 32) * 2, 4), "it ends too early"),
    "a shape beyond the file": (lambda c: after(c, EMBEDDING, number(1 << 20), 4), "it ends too early"),
    "an unknown type": (lambda c: after(c, EMBEDDING, number(200, 4), 20), "200 is not a valid GGMLQuantizationType"),
    "a place beyond the file": (lambda c: after(c, EMBEDDING, number(1 << 40), 24), "it ends too early"),
    "a place before the file": (lambda c: after(c, EMBEDDING, number((1 << 64) - 64), 24), "it ends too early"),
    "tensors over each other": (
        lambda c: after(c, text("output.weight"), number(0), 24),
        "lies over what comes before",
    ),
    "the last byte gone": (lambda c: c[:-1], "it ends too early"),
    "nothing": (lambda c: b"", "not a whole GGUF file"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> bytes:
    tensors = {name: np.zeros((TINY_VOCAB, 64), np.float32) for name in ("token_embd.weight", "output.weight")}
    return make_tiny_gguf(tmp_path_factory.mktemp("good") / "tiny.gguf", tensors).read_bytes()


@pytest.mark.parametrize("lie", GGUF_LIES)
def test_a_gguf_file_that_lies(lie: str, tiny: bytes, sides, tmp_path: Path) -> None:
    change, words = GGUF_LIES[lie]
    model = tmp_path / "liar.gguf"
    model.write_bytes(change(tiny))
    assert model.read_bytes() != tiny
    assert words in (said := refusal(sides, model))
    assert said.startswith(str(model))


def test_an_array_that_runs_through_a_large_file(tiny: bytes, sides, tmp_path: Path) -> None:
    """A hundred million numbers that are there would be a hundred million objects."""
    model = tmp_path / "sparse.gguf"
    model.write_bytes(after(tiny, TOKENS, number(0, 4) + number(100_000_000)))
    os.truncate(model, 110_000_000)
    assert "an array of 100000000 items" in refusal(sides, model)
    os.truncate(model, 1 << 42)
    assert str(model) in refusal(sides, model)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": 10**9}, "'llama.block_count' is 1000000000; supported is"),
        ({"llama.context_length": 2**32 - 1}, "'llama.context_length' is 4294967295; supported is"),
        ({"llama.context_length": 2**31 - 1}, "context 2147483647 is too large; supported is at most 16777216"),
        ({"llama.embedding_length": 2**30, "llama.attention.head_count": 2}, "head_dim 536870912 is too large"),
        ({"llama.attention.head_count": 0}, "'llama.attention.head_count' is 0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon' is nan"),
        ({"llama.rope.freq_base": 1.0}, "the rotary base is 1.0; supported is at least 2"),
        ({"llama.rope.freq_base": float("inf")}, "'llama.rope.freq_base' is inf"),
        ({"llama.expert_count": 10**6, "llama.expert_used_count": 2}, "number of experts 1000000 is too large"),
        ({"general.sampling.temp": float("nan")}, "'general.sampling.temp' is nan; supported is a number"),
        ({"tokenizer.ggml.tokens": 5}, "'tokenizer.ggml.tokens' is 5; supported is a list of strings"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "'tokenizer.ggml.tokens' is [1, 2]; supported is a list of strings"),
        ({"tokenizer.ggml.tokens": ["a" * 100_000]}, "1 tokens of up to 100000 characters"),
        ({"tokenizer.ggml.token_type": 3}, "'tokenizer.ggml.token_type' is 3; supported is a list of whole numbers"),
        ({"tokenizer.ggml.bos_token_id": 10**6, "tokenizer.ggml.add_bos_token": True}, "a token id below 512"),
    ],
)  # fmt: skip
def test_metadata_that_lie(metadata: dict[str, Any], words: str, sides, tmp_path: Path) -> None:
    model = make_tiny_gguf(tmp_path / "liar.gguf", metadata=metadata)
    assert words in (said := refusal(sides, model))
    assert said.startswith(str(model))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rope_freqs.weight", np.zeros(8)),
        ("rope_freqs.weight", np.full(8, np.nan)),
        ("rope_freqs.weight", np.ones((2, 8))),
        ("rope_freqs.weight", np.ones(1 << 15)),
        ("rope_factors_long.weight", np.ones(8)),
    ],
)
def test_rotary_factors_that_lie(name: str, values: np.ndarray, sides, tmp_path: Path) -> None:
    given = {"llama.rope.scaling.original_context_length": 64}
    model = make_tiny_gguf(tmp_path / "liar.gguf", {name: values.astype(np.float32)}, metadata=given)
    assert "rotary factors must be" in (said := refusal(sides, model)) or "must be a list of at most" in said
