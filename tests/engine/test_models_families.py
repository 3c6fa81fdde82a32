"""Every family against transformers, on small random checkpoints."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import Decoder, load_decoder
from tests.support.families import VARIANTS, make_variant
from tests.support.forward import generate, logits_in_random_steps
from tests.support.gguf_families import convert

NUM_TOKENS = 64
NEAR_TIE = 1e-3  # float32 sums in another order may choose the other of two tokens that are closer than this


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads gain nothing at this size, and collapse when another process wants the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
