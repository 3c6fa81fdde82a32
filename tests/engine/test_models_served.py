"""Families that are no Llama, through router and worker."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.checkpoints import tiny_tokenizer
from tests.support.engine import Ask, running_router
from tests.support.families import make_variant

PROMPTS = ["the rain in the north", "one", "that sailor was not on that ship, and the others were"]
NUM_TOKENS = 24


@pytest.mark.parametrize("variant", ["gemma3", "qwen3 moe", "phi4-mini, short"])
def test_greedy_text_is_that_of_transformers(variant: str, tmp_path: Path) -> None:
    folder = make_variant(tmp_path, variant)
    fields = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "exclude_input_in_output": True}
    asks = [Ask([], fields, text=prompt) for prompt in PROMPTS]
    with running_router(folder, weights="fp32", prefill_chunk=7) as router:
        for ask in asks:
            router.submit(ask.inbound())
        answers = [ask.sender.wait(30.0) for ask in asks]
    assert [answer.error for answer in answers] == [None] * len(PROMPTS)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert [answer.text for answer in answers] == [greedy_text(reference, prompt) for prompt in PROMPTS]


@torch.inference_mode()
def greedy_text(model: PreTrainedModel, prompt: str) -> str:
    tokenizer = tiny_tokenizer()
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    whole, beginning = (tokenizer.decode(out[0, :end].tolist()) for end in (None, ids.shape[1]))
    return whole[len(beginning) :]
