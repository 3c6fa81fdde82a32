"""onnxruntime-genai's generator: a static batch, all of whose rows begin and end together."""

from __future__ import annotations

import json

import numpy as np
import onnxruntime_genai as genai
from answering import Emit, answer, keep_stdout, parse_arguments


def main() -> None:
    descriptor = keep_stdout()
    args = parse_arguments()
    config = genai.Config(args.model)
    threads = {"session_options": {"intra_op_num_threads": args.threads}}
    config.overlay(json.dumps({"model": {"decoder": threads}}))
    model = genai.Model(config)

    def generate(prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        length = len(prompts[0]) + tokens
        params = genai.GeneratorParams(model)
        # With the least length equal to the greatest the end-of-sequence token is never chosen.
        params.set_search_options(batch_size=len(prompts), max_length=length, min_length=length, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(tokens):
            generator.generate_next_token()
            for row in range(len(prompts)):
                emit(row)

    answer(generate, descriptor, ["onnxruntime", "onnxruntime-genai"])


main()
