"""Hugging Face transformers' `generate`: a static batch."""

from __future__ import annotations

import torch
from answering import Emit, answer, keep_stdout, parse_arguments
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class EveryStep(StoppingCriteria):
    """Asked after each token of a batch; never stops it."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        for row in range(len(input_ids)):
            self.emit(row)
        return torch.zeros(len(input_ids), dtype=torch.bool)


def main() -> None:
    descriptor = keep_stdout()
    args = parse_arguments(dtype="float32")
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        ids = torch.tensor(prompts)
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
            stopping_criteria=StoppingCriteriaList([EveryStep(emit)]), pad_token_id=0,
        )  # fmt: skip

    answer(generate, descriptor, ["torch", "transformers"])


main()
