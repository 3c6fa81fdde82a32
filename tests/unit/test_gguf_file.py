"""GGUF files: metadata, and what is said of files that are damaged or ask for what is not supported."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backend_lib.checkpoint import RopeScaling, open_checkpoint
from tests.support.checkpoints import make_tiny_gguf

HEAD = {"output.weight": np.zeros((512, 64), dtype=np.float32)}


def test_metadata(tmp_path: Path) -> None:
    file = make_tiny_gguf(tmp_path / "tiny.gguf", HEAD, tokenizer__chat_template="T", tokenizer__ggml__eot_token_id=5)
    checkpoint = open_checkpoint(str(file))
    config = checkpoint.config
    assert checkpoint.name == "tiny"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (512, 64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert not config.tie_word_embeddings
    assert (checkpoint.eos_token_ids, checkpoint.chat_template, checkpoint.context_length) == ((1, 5), "T", 512)
    assert (checkpoint.bos_token, checkpoint.eos_token) == ("<s>", "</s>")


def test_what_may_be_left_out(tmp_path: Path) -> None:
    left_out = dict.fromkeys(["llama__vocab_size", "tokenizer__ggml__eos_token_id", "tokenizer__ggml__bos_token_id"])
    checkpoint = open_checkpoint(str(make_tiny_gguf(tmp_path / "tiny.gguf", **left_out)))
    assert checkpoint.config.vocab_size == 512
    assert checkpoint.config.tie_word_embeddings
    assert (checkpoint.eos_token_ids, checkpoint.bos_token, checkpoint.chat_template) == ((), "", None)


def test_sampling_defaults(tmp_path: Path) -> None:
    sampling = {"general__sampling__temp": 0.7, "general__sampling__top_k": 20}
    checkpoint = open_checkpoint(str(make_tiny_gguf(tmp_path / "tiny.gguf", **sampling)))
    assert checkpoint.sampling.given() == pytest.approx({"temperature": 0.7, "top_k": 20})


def test_smollm2() -> None:
    checkpoint = open_checkpoint("smollm2")
    config = checkpoint.config
    assert checkpoint.name == "smollm2"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.layers[0].rope.theta) == (30, 9, 3, 1e5)
    assert config.tie_word_embeddings
    assert (checkpoint.eos_token_ids, checkpoint.context_length) == ((2,), 8192)
    assert "<|im_start|>" in checkpoint.chat_template


def test_rotary_scaling(tmp_path: Path) -> None:
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0}
    config = open_checkpoint(str(make_tiny_gguf(tmp_path / "linear.gguf", **linear))).config
    assert config.layers[0].rope.scaling == RopeScaling(kind="linear", factor=2.0)
    factors = {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}
    config = open_checkpoint(str(make_tiny_gguf(tmp_path / "factors.gguf", factors))).config
    assert config.layers[0].rope.scaling == RopeScaling(
        kind="factors", factors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, r"'llama\.expert_used_count' is missing"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "9 experts per token are asked for, of 8"),
        ({"llama.expert_count": 8, "llama.expert_gating_func": 2}, r"'llama\.expert_gating_func' is 2"),
        ({"llama.block_count": None}, r"'llama\.block_count' is missing"),
        ({"llama.attention.head_count": [4, 4]}, r"'llama\.attention\.head_count' is \[4, 4\]"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"llama.rope.scaling.type": "ntk"}, "'llama.rope.scaling.type' is 'ntk'; supported is 'none', 'linear'"),
        ({"llama.rope.scaling.type": "yarn"}, "'llama.rope.scaling.factor' is missing"),
        ({"llama.attention.value_length": 8}, "'llama.attention.value_length' is 8; supported is 16"),
        ({"llama.rope.dimension_count": 8}, "'llama.rope.dimension_count' is 8; supported is 16"),
        ({"tokenizer.ggml.model": "bert"}, "'tokenizer.ggml.model' is 'bert'; supported is 'gpt2'"),
        ({"tokenizer.ggml.model": "llama"}, "'tokenizer.ggml.scores' is missing"),
        (
            {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0]},
            "1 values of 'tokenizer.ggml.scores' for 512 tokens",
        ),
        ({"tokenizer.ggml.pre": "mpt"}, "'tokenizer.ggml.pre' is 'mpt'; supported is .*'smollm'"),
        ({"tokenizer.ggml.merges": None}, "'tokenizer.ggml.merges' is missing"),
        ({"tokenizer.ggml.merges": ["x y", "nothing"]}, "'tokenizer.ggml.merges' do not fit the tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 values of 'tokenizer.ggml.token_type' for 512 tokens"),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 600},
            "'tokenizer.ggml.bos_token_id' is 600",
        ),
    ],
)
def test_what_is_not_supported_is_named(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = make_tiny_gguf(tmp_path / "tiny.gguf", **{key.replace(".", "__"): value for key, value in metadata.items()})
    with pytest.raises(ValueError, match=message) as error:
        open_checkpoint(str(file))
    assert "tiny.gguf" in str(error.value)


def test_another_architecture_is_named(tmp_path: Path) -> None:
    file = make_tiny_gguf(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ValueError, match=r"tiny\.gguf: 'general\.architecture' is 'mamba'; supported is .*'llama'"):
        open_checkpoint(str(file))


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    whole = make_tiny_gguf(tmp_path / "tiny.gguf", HEAD).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(40), 100, 1000, len(whole) // 2, len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            open_checkpoint(str(cut))


def test_a_length_beyond_the_file_does_not_hang(tmp_path: Path) -> None:
    file = make_tiny_gguf(tmp_path / "tiny.gguf")
    string, array = (8).to_bytes(4, "little"), (9).to_bytes(4, "little")
    key = b"general.architecture"
    file.write_bytes(file.read_bytes().replace(key + string, key + array))
    with pytest.raises(ValueError, match=r"tiny\.gguf is not a whole GGUF file: it ends too early"):
        open_checkpoint(str(file))


def test_garbled_bytes_never_give_anything_but_a_value_error(tmp_path: Path) -> None:
    whole = make_tiny_gguf(tmp_path / "tiny.gguf", HEAD).read_bytes()
    garbled = tmp_path / "garbled.gguf"
    generator = random.Random(0)
    for _ in range(150):
        content = bytearray(whole)
        content[generator.randrange(len(whole) // 8)] ^= 1 << generator.randrange(8)
        garbled.write_bytes(content)
        try:
            open_checkpoint(str(garbled))
        except ValueError as error:
            assert "garbled.gguf" in str(error)
