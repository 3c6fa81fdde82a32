"""Stream one answer over HTTP, with `requests` only.

    python client_examples/http_stream.py "The capital of France is" --max-tokens 32

The server sends server-sent events: lines that begin with "data: ", each a JSON object.
"""

import argparse
import json

import requests


def stream(url, model, prompt, **sampling):
    """Yield the pieces of the answer as they come."""
    body = {"text_input": prompt, "stream": True, **sampling}
    with requests.post(f"{url}/v2/models/{model}/generate_stream", json=body, stream=True, timeout=600) as answer:
        if answer.status_code != 200:
            raise RuntimeError(answer.text)
        for line in answer.iter_lines(chunk_size=1):  # a larger chunk would wait until it is full
            if line.startswith(b"data: "):
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:  # the status is sent with the first piece, so what fails later comes as an event
                    raise RuntimeError(event["error"])
                yield event["text_output"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    for piece in stream(args.url, args.model, args.prompt, max_tokens=args.max_tokens, temperature=0):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
