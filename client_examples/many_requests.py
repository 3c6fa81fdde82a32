"""Answer many prompts, a bounded number at once: a JSON line for each on stdout, the throughput on stderr.

    python client_examples/many_requests.py --file prompts.txt --concurrency 16 > answers.jsonl
    python client_examples/many_requests.py "Once upon a time" --repeat 32

Needs `pip install tritonclient[grpc]`.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as grpc


def tensor(name, value, datatype):
    """An input of one element."""
    tensor = grpc.InferInput(name, [1], datatype)
    tensor.set_data_from_numpy(np.array([value], dtype=np.object_ if datatype == "BYTES" else None))
    return tensor


async def request(model, prompt, **sampling):
    """The messages of one stream: here a single request, whose answer comes in one piece."""
    inputs = [
        tensor("text_input", prompt.encode(), "BYTES"),
        tensor("sampling_parameters", json.dumps(sampling).encode(), "BYTES"),
        tensor("exclude_input_in_output", True, "BOOL"),
        tensor("return_num_output_tokens", True, "BOOL"),
    ]
    yield {"model_name": model, "inputs": inputs}


async def answer(client, model, prompt, **sampling):
    """The text and its number of tokens."""
    async for result, error in client.stream_infer(request(model, prompt, **sampling)):
        if error:
            raise error
        return result.as_numpy("text_output")[0].decode(), int(result.as_numpy("num_output_tokens")[0])
    raise RuntimeError("the server closed the stream without an answer")


async def answer_all(url, model, prompts, concurrency, max_tokens):
    """The answers in the order of the prompts. The server batches what runs at once, but its queue is bounded."""
    places = asyncio.Semaphore(concurrency)
    async with grpc.InferenceServerClient(url) as client:

        async def one(prompt):
            async with places:
                return await answer(client, model, prompt, max_tokens=max_tokens, temperature=0)

        return await asyncio.gather(*map(one, prompts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--file", type=Path, help="a prompt in each line, instead of one prompt so many times")
    parser.add_argument("--repeat", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="llm")
    args = parser.parse_args()
    prompts = args.file.read_text().splitlines() if args.file else [args.prompt] * args.repeat
    started = time.perf_counter()
    answers = asyncio.run(answer_all(args.url, args.model, prompts, args.concurrency, args.max_tokens))
    seconds = time.perf_counter() - started
    for prompt, (text, _) in zip(prompts, answers, strict=True):
        print(json.dumps({"prompt": prompt, "answer": text}, ensure_ascii=False))
    tokens = sum(tokens for _, tokens in answers)
    speed = f"{tokens / seconds:.0f} tokens/s"
    print(f"{len(answers)} answers, {tokens} tokens in {seconds:.1f} s: {speed}", file=sys.stderr)


if __name__ == "__main__":
    main()
