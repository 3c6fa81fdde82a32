"""CTranslate2's generator: a static batch."""

from __future__ import annotations

import os
from pathlib import Path

import ctranslate2
from answering import Emit, answer, keep_stdout, parse_arguments
from tokenizers import Tokenizer


def main() -> None:
    descriptor = keep_stdout()
    args = parse_arguments(tokenizer="", compute_type="default")
    names = Tokenizer.from_file(str(Path(args.tokenizer, "tokenizer.json"))).id_to_token
    generator = ctranslate2.Generator(
        args.model, device="cpu", compute_type=args.compute_type, inter_threads=1, intra_threads=args.threads
    )

    def generate(prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        def step(result: ctranslate2.GenerationStepResult) -> bool:
            emit(result.batch_id)
            return False

        generator.generate_batch(
            [[names(token) for token in ids] for ids in prompts],
            max_length=tokens, min_length=tokens, beam_size=1, sampling_topk=1, include_prompt_in_result=False,
            callback=step,
        )  # fmt: skip

    answer(generate, descriptor, ["ctranslate2"])
    os._exit(0)  # its threads abort the process on the usual way out


main()
