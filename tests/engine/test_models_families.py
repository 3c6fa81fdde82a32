"""Every family against transformers, on small random checkpoints."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3ForConditionalGeneration

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import Decoder, load_decoder
from tests.support.checkpoints import LLAMA3_ROPE
from tests.support.families import VARIANTS, make_gemma3_with_vision, make_variant
from tests.support.forward import generate, logits_in_random_steps
from tests.support.gguf_families import convert

NUM_TOKENS = 64
NEAR_TIE = 1e-3  # float32 sums in another order may choose the other of two tokens that are closer than this


pytestmark = pytest.mark.usefixtures("one_thread")


def sequences(*lengths: int) -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(2, 512, n).tolist() for n in lengths]


def load(path: Path, weights: str = "fp32", **settings) -> Decoder:
    return load_decoder(open_checkpoint(str(path)), Settings(weights=weights, **settings))


def reference(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logits(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    # In torch, because Python's max would pass over a NaN.
    return float((torch.cat(ours) - torch.cat(theirs)).abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_mixed_steps(variant: str, tmp_path: Path) -> None:
    path = make_variant(tmp_path, variant)
    # transformers changes longrope's frequencies with the length, so a sequence must be of one kind.
    ids = sequences(9, 17, 100, 42) if variant == "phi4-mini, long" else sequences(1, 17, 100, 42)
    ours = logits_in_random_steps(load(path), ids)
    model = reference(path)
    theirs = [reference_logits(model, each) for each in ids]
    assert all(logits.dtype == torch.float32 for logits in ours)
    assert float(torch.cat(theirs).std()) > 0.3  # the test would pass were they all the same
    assert largest_difference(ours, theirs) < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens(variant: str, tmp_path: Path) -> None:
    path = make_variant(tmp_path, variant, seed=1)
    prompts = sequences(9, 30, 55)
    outputs = generate(load(path), prompts, num_tokens=NUM_TOKENS, chunk=7)
    model = reference(path)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_TOKENS
        if output != greedy(model, prompt):
            assert margin_lost(model, prompt, output) < NEAR_TIE


@torch.inference_mode()
def greedy(model, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist()


def margin_lost(model, prompt: list[int], output: list[int]) -> float:
    """By how much the reference's best logit exceeds that of our token, at the worst of our tokens."""
    logits = reference_logits(model, prompt + output)[len(prompt) - 1 : -1]
    return float((logits.max(1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]).max())


@pytest.mark.parametrize("variant", ["gemma3", "phi3", "mixtral", "qwen2, tied", "qwen3 moe, some layers dense"])
def test_several_shards_give_the_logits_of_one(variant: str, tmp_path: Path) -> None:
    one, several = make_variant(tmp_path / "one", variant), make_variant(tmp_path / "n", variant, shard_size="60KB")
    assert len(list(several.glob("*.safetensors"))) > 2
    ours, theirs = (logits_in_random_steps(load(path), sequences(17, 42)) for path in (several, one))
    assert largest_difference(ours, theirs) == 0.0


@pytest.mark.parametrize("variant", ["gemma2", "phi3", "mixtral", "qwen2, window", "qwen3"])
def test_fp16_weights_are_close(variant: str, tmp_path: Path) -> None:
    path = make_variant(tmp_path, variant)
    theirs = [reference_logits(reference(path), ids) for ids in sequences(17, 42)]
    ours = logits_in_random_steps(load(path, "fp16"), sequences(17, 42))
    spread = max(float(logits.abs().max()) for logits in theirs)
    assert largest_difference(ours, theirs) < 1e-2 * spread


# As published before transformers 5, which reads both and writes the new one. None takes a field away.
OLD_SPELLINGS = {
    "llama, llama3 rope, tied": {
        "rope_parameters": None, "rope_theta": 10000.0,
        "rope_scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
    },
    "llama, linear rope": {
        "rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "mistral": {"rope_parameters": None, "rope_theta": 1e6, "head_dim": 20},
    "qwen2, tied": {
        "rope_parameters": None, "rope_theta": 1e6, "layer_types": None, "use_sliding_window": False,
        "sliding_window": 9, "max_window_layers": 2,
    },
    "qwen2, window": {"rope_parameters": None, "rope_theta": 1e4, "layer_types": None, "use_sliding_window": True,
        "sliding_window": 9, "max_window_layers": 2,
    },
    "qwen2, yarn": {
        "rope_parameters": None, "rope_theta": 1e4, "max_position_embeddings": 128,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "qwen3, yarn, tied": {
        "rope_parameters": None, "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8,
            "beta_fast": 16, "beta_slow": 2,
        },
    },
    "smollm3": {"rope_parameters": None, "rope_theta": 5e6, "layer_types": None, "no_rope_layers": None},
    "gemma2": {"rope_parameters": None, "rope_theta": 1e4, "layer_types": None, "tie_word_embeddings": None},
    "gemma3": {
        "rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "layer_types": None,
        "_sliding_window_pattern": None, "sliding_window_pattern": 3, "tie_word_embeddings": None,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
    "phi4-mini, long": {
        "rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 0.7,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
        },
    },
    "phi4-mini, short": {
        "rope_parameters": None, "rope_theta": 1e4, "partial_rotary_factor": 0.7,
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0], "long_factor": [9.0] * 7,
        },
    },
    "mixtral": {"rope_parameters": None, "rope_theta": 1e6, "rms_norm_eps": None},
    "qwen3 moe, some layers dense": {
        "rope_parameters": None, "rope_theta": 1e6, "num_local_experts": None, "num_experts": 6,
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", OLD_SPELLINGS)
def test_configurations_as_they_were_published(variant: str, tmp_path: Path) -> None:
    path = make_variant(tmp_path, variant)
    config = json.loads((path / "config.json").read_text())
    for key, value in OLD_SPELLINGS[variant].items():
        config.pop(key, None)
        config |= {} if value is None else {key: value}
    (path / "config.json").write_text(json.dumps(config))
    ids = sequences(9, 100)
    ours = logits_in_random_steps(load(path), ids)
    model = reference(path)
    assert largest_difference(ours, [reference_logits(model, each) for each in ids]) < 1e-4


@pytest.mark.parametrize("prefixes", [None, ("model.language_model.", "language_model.model.")])
def test_the_text_part_of_gemma3_with_vision(prefixes: tuple[str, str] | None, tmp_path: Path) -> None:
    path = make_gemma3_with_vision(tmp_path)
    ids = sequences(17, 42)
    model = Gemma3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    theirs = [reference_logits(model.eval(), each) for each in ids]
    if prefixes:  # as first published
        tensors = load_file(path / "model.safetensors")
        assert any(prefixes[0] in name for name in tensors) or any(prefixes[1] in name for name in tensors)
        renamed = {name.replace(*prefixes): values for name, values in tensors.items()}
        save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})
    assert largest_difference(logits_in_random_steps(load(path), ids), theirs) < 1e-4


# What llama.cpp does not do, or knows by other names.
NOT_AS_GGUF = {
    "llama, dynamic rope",
    "qwen2, window",
    "qwen3 moe, some layers dense",
    "smollm3, window, untied",
}


@pytest.mark.parametrize("variant", [each for each in VARIANTS if each not in NOT_AS_GGUF])
def test_gguf_gives_the_logits_of_the_folder(variant: str, tmp_path: Path) -> None:
    # It has no query_pre_attn_scalar: a size of head it is.
    scalar = {"query_pre_attn_scalar": 20} if variant.startswith("gemma") else {}
    folder = make_variant(tmp_path / "folder", variant, **scalar)
    file = convert(folder, tmp_path / "model.gguf")
    ids = sequences(3, 42, 100)
    ours, theirs = (logits_in_random_steps(load(path), ids) for path in (file, folder))
    assert largest_difference(ours, theirs) < 1e-5
    assert open_checkpoint(str(file)).context_length == open_checkpoint(str(folder)).context_length


@pytest.mark.parametrize("pattern", [3, [True, True, False, True, True, False, True]])
def test_ggufs_may_say_which_layers_have_a_window(pattern: int | list[bool], tmp_path: Path) -> None:
    folder = make_variant(tmp_path / "folder", "gemma3")
    file = convert(folder, tmp_path / "model.gguf", gemma3__attention__sliding_window_pattern=pattern)
    windows = [layer.window for layer in open_checkpoint(str(file)).config.layers]
    assert windows == [9, 9, None, 9, 9, None, 9]
    file = convert(folder, tmp_path / "model.gguf", gemma3__attention__sliding_window=None)
    assert {layer.window for layer in open_checkpoint(str(file)).config.layers} == {None}


@pytest.mark.parametrize("pattern", [[True], [1, 0, 1, 0, 1, 0, 1]])
def test_a_pattern_of_windows_without_sense_is_named(pattern: list, tmp_path: Path) -> None:
    folder = make_variant(tmp_path / "folder", "gemma3")
    file = convert(folder, tmp_path / "model.gguf", gemma3__attention__sliding_window_pattern=pattern)
    with pytest.raises(
        ValueError, match=r"'gemma3\.attention\.sliding_window_pattern' is .*; supported is a number, or 7"
    ):
        open_checkpoint(str(file))


@pytest.mark.parametrize(("variant", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_ggufs_of_gemmas_27b_scale_scores_by_hidden_size_over_heads(variant: str, layers: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
    folder = make_variant(tmp_path, variant, num_hidden_layers=layers, query_pre_attn_scalar=6, **sizes)
    file = convert(folder, tmp_path / "model.gguf")
    assert open_checkpoint(str(file)).config.attention_scale == open_checkpoint(str(folder)).config.attention_scale


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_quantised_experts_are_read(kind: str, tmp_path: Path) -> None:
    """A block of a quantised tensor is 32 values long, so its rows are as well."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
    folder = make_variant(tmp_path / "folder", "mixtral", **sizes)
    file = convert(folder, tmp_path / "model.gguf", quantization=gguf.GGMLQuantizationType[kind])
    ours, theirs = (logits_in_random_steps(load(path), [[1, 2, 3]])[0] for path in (file, folder))
    assert float((ours - theirs).norm() / theirs.norm()) < {"F16": 1e-2, "Q8_0": 1e-1, "Q4_0": 1.0}[kind]
