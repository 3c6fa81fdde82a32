"""The built-in model against transformers on the same dequantised weights."""

from pathlib import Path

import pytest
import torch
from gguf import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from backend_lib.checkpoint import Checkpoint, open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import load_decoder
from tests.support.forward import generate, logits_in_random_steps

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at 100 degrees, and freezes at",
    "Once upon a time, in a village by the sea, there lived an old fisherman who had never caught a fish. Every day",
    "H",
    "Le chat est sur la table. In English:",
]
NUM_TOKENS = 64
NEAR_TIE = 1e-3  # float32 sums in another order may choose the other of two tokens that are closer than this


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    return [checkpoint.tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """transformers' Llama with the tensors as the gguf package dequantises them, its own names and head layout."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    values = {
        each.name: torch.tensor(dequantize(each.data, each.tensor_type)) for each in checkpoint.weights.gguf.tensors
    }
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(values["token_embd.weight"])
        model.model.norm.weight.copy_(values["output_norm.weight"])
        for i, layer in enumerate(model.model.layers):
            copy_layer(layer, {name.removeprefix(f"blk.{i}."): each for name, each in values.items()})
    return model


def copy_layer(layer, values: dict[str, torch.Tensor]) -> None:
    layer.input_layernorm.weight.copy_(values["attn_norm.weight"])
    layer.post_attention_layernorm.weight.copy_(values["ffn_norm.weight"])
    layer.self_attn.q_proj.weight.copy_(halves_apart(values["attn_q.weight"]))
    layer.self_attn.k_proj.weight.copy_(halves_apart(values["attn_k.weight"]))
    layer.self_attn.v_proj.weight.copy_(values["attn_v.weight"])
    layer.self_attn.o_proj.weight.copy_(values["attn_output.weight"])
    layer.mlp.gate_proj.weight.copy_(values["ffn_gate.weight"])
    layer.mlp.up_proj.weight.copy_(values["ffn_up.weight"])
    layer.mlp.down_proj.weight.copy_(values["ffn_down.weight"])


def halves_apart(weight: torch.Tensor) -> torch.Tensor:
    """In each head of 64 rows, the even ones first, then the odd ones."""
    return torch.cat([torch.cat([head[0::2], head[1::2]]) for head in weight.split(64)])


@torch.inference_mode()
def margin_lost(reference: LlamaForCausalLM, prompt: list[int], output: list[int]) -> float:
    """By how much the reference's best logit exceeds that of our token, at the worst of our tokens.

    0 at all of them means that the reference, decoding greedily, says the same tokens.
    """
    logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    return float((logits.max(1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]).max())


def test_greedy_tokens_in_unequal_batches(checkpoint, reference, prompts) -> None:
    decoder = load_decoder(checkpoint, Settings(weights="fp32"))
    outputs = generate(decoder, prompts, num_tokens=NUM_TOKENS, chunk=3)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NUM_TOKENS
        assert margin_lost(reference, prompt, output) < NEAR_TIE
    assert " Paris" in checkpoint.tokenizer.decode(outputs[0])


def test_the_folder_gives_the_logits_of_the_gguf(checkpoint, reference, prompts, tmp_path: Path) -> None:
    reference.save_pretrained(tmp_path)
    checkpoint.tokenizer.save(str(tmp_path / "tokenizer.json"))
    folder = open_checkpoint(str(tmp_path))
    assert folder.eos_token_ids == checkpoint.eos_token_ids
    ours, theirs = (
        torch.cat(logits_in_random_steps(load_decoder(each, Settings(weights="fp32")), prompts[:3]))
        for each in (folder, checkpoint)
    )
    assert float((ours - theirs).abs().max()) < 1e-3  # not equal to the bit: sums depend on how memory is aligned
    for path in tmp_path.glob("*.safetensors"):  # half a gigabyte, which pytest would keep for three runs
        path.unlink()


@torch.inference_mode()
def test_fp16_weights_are_close(checkpoint, reference, prompts) -> None:
    logits = logits_in_random_steps(load_decoder(checkpoint, Settings(weights="fp16")), prompts[3:5])
    for prompt, ours in zip(prompts[3:5], logits, strict=True):
        assert float((ours - reference(torch.tensor([prompt])).logits[0]).abs().max()) < 0.05
