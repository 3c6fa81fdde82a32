"""OpenVINO GenAI's continuous batching, stepped in its own process, on a GGUF file as it is or a folder."""

from __future__ import annotations

import numpy as np
import openvino
import openvino_genai as genai
from answering import Emit, answer, keep_stdout, parse_arguments

BLOCK_TOKENS = 32  # of the KV cache, on a CPU


def main() -> None:
    descriptor = keep_stdout()
    args = parse_arguments(kv_tokens="12288", max_running="32", precision="")
    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = int(args.kv_tokens) // BLOCK_TOKENS
    scheduler.max_num_seqs = int(args.max_running)
    scheduler.enable_prefix_caching = False
    properties: dict[str, object] = {"INFERENCE_NUM_THREADS": args.threads}
    if args.precision:  # else it takes what the processor is fastest at
        properties["INFERENCE_PRECISION_HINT"] = args.precision
    pipeline = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], tokens: int, emit: Emit) -> None:
        config = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        handles = [
            pipeline.add_request(row, openvino.Tensor(np.array([ids], np.int64)), config)
            for row, ids in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for row, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        for _ in output.generated_ids:
                            emit(row)

    answer(generate, descriptor, ["openvino", "openvino-genai"])


main()
