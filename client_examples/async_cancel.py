"""Stream with asyncio, and cancel when enough has come: the server stops computing the rest.

    python client_examples/async_cancel.py "Once upon a time" --pieces 10

Needs `pip install tritonclient[grpc]`.
"""

import argparse
import asyncio
import json

import numpy as np
import tritonclient.grpc.aio as grpc


def tensor(name, value, datatype):
    """An input of one element."""
    tensor = grpc.InferInput(name, [1], datatype)
    tensor.set_data_from_numpy(np.array([value], dtype=np.object_ if datatype == "BYTES" else None))
    return tensor


async def request(model, prompt, **sampling):
    """The messages of one stream: here a single request."""
    inputs = [
        tensor("text_input", prompt.encode(), "BYTES"),
        tensor("stream", True, "BOOL"),
        tensor("sampling_parameters", json.dumps(sampling).encode(), "BYTES"),
    ]
    yield {"model_name": model, "inputs": inputs}


async def first_pieces(client, model, prompt, count):
    """Print the first pieces of a long answer, then cancel it. The number of pieces that came."""
    answers = client.stream_infer(request(model, prompt, max_tokens=1000, ignore_eos=True, temperature=0))
    pieces = 0
    async for result, error in answers:
        if error:
            raise error
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
        pieces += 1
        if pieces == count:
            answers.cancel()
            break
    return pieces


async def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--pieces", type=int, default=10)
    args = parser.parse_args()
    async with grpc.InferenceServerClient(args.url) as client:
        pieces = await first_pieces(client, args.model, args.prompt, args.pieces)
    print(f"\ncancelled after {pieces} pieces")


if __name__ == "__main__":
    asyncio.run(main())
