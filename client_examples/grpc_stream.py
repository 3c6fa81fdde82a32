"""Stream one answer over gRPC.

    python client_examples/grpc_stream.py "The capital of France is" --max-tokens 32

Needs `pip install tritonclient[grpc]`.
"""

import argparse
import json
import queue

import numpy as np
import tritonclient.grpc as grpc


def tensor(name, value, datatype):
    """An input of one element."""
    tensor = grpc.InferInput(name, [1], datatype)
    tensor.set_data_from_numpy(np.array([value], dtype=np.object_ if datatype == "BYTES" else None))
    return tensor


def stream(client, model, prompt, **sampling):
    """Yield the pieces of the answer as they come."""
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result))
    inputs = [
        tensor("text_input", prompt.encode(), "BYTES"),
        tensor("stream", True, "BOOL"),
        tensor("sampling_parameters", json.dumps(sampling).encode(), "BYTES"),
    ]
    client.async_stream_infer(model, inputs, enable_empty_final_response=True)
    is_final = False
    while not is_final:
        answer = answers.get()
        if isinstance(answer, Exception):
            raise answer
        yield answer.as_numpy("text_output")[0].decode()
        is_final = answer.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    with grpc.InferenceServerClient(args.url) as client:
        for piece in stream(client, args.model, args.prompt, max_tokens=args.max_tokens, temperature=0):
            print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
