"""Closed-loop load on a running server over gRPC streaming: throughput, time to first token, inter-token latency.

    make serve                                                            # in another terminal
    python benchmarks/serve.py --concurrency 1 8 --requests 4 --input-words 120 --output-tokens 128

`--requests` is per client. A figure of one concurrency is over all of its requests; EOS is ignored, so that every
request has the same length. Times are the client's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field

import numpy as np
import tritonclient.grpc.aio as grpc

WORDS = "the of and to in is that it for was on are as with his they at be this have from or one had by word but".split()


@dataclass
class Measured:
    """One request: seconds from its start to each response, and the tokens in each."""

    input_tokens: int = 0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def inter_token(self) -> list[float]:
        """Seconds between tokens; tokens that came in one response share the gap before it."""
        gaps = zip(self.times, self.times[1:], self.tokens[1:], strict=False)
        return [(after - before) / count for before, after, count in gaps for _ in range(count)]


@dataclass(frozen=True)
class Summary:
    """Of one concurrency. Times in milliseconds, percentiles over all requests or tokens."""

    concurrency: int
    requests: int
    errors: int
    input_tokens: float
    output_tokens_per_s: float
    ttft_p50: float
    ttft_p99: float
    inter_token_p50: float
    inter_token_p99: float
    e2e_p50: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001", help="the server's gRPC address")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=4, help="requests of each client, after one to warm up")
    parser.add_argument("--input-words", type=int, default=120)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    summaries = [asyncio.run(run_closed(args, clients)) for clients in args.concurrency]
    _print_table(summaries)
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(summary) for summary in summaries], file, indent=2)


async def run_closed(args: argparse.Namespace, clients: int) -> Summary:
    """`clients` clients, each of which sends its next request when it has the answer to the last."""
    async with grpc.InferenceServerClient(args.url) as client:
        await one_request(client, args, output_tokens=4)
        started = time.perf_counter()
        results = await asyncio.gather(*(_one_client(client, args) for _ in range(clients)))
        seconds = time.perf_counter() - started
    return _summary(clients, [request for client_results in results for request in client_results], seconds)


async def one_request(
    client: grpc.InferenceServerClient, args: argparse.Namespace, *, output_tokens: int
) -> Measured:
    prompt = " ".join(random.choices(WORDS, k=args.input_words))
    measured = Measured()
    started = time.perf_counter()
    async for result, error in client.stream_infer(_once(args.model, prompt, output_tokens)):
        if error:
            measured.error = str(error)
            break
        measured.times.append(time.perf_counter() - started)
        measured.tokens.append(int(result.as_numpy("num_output_tokens")[0]))
        measured.input_tokens = int(result.as_numpy("num_input_tokens")[0])
    return measured


async def _one_client(client: grpc.InferenceServerClient, args: argparse.Namespace) -> list[Measured]:
    return [await one_request(client, args, output_tokens=args.output_tokens) for _ in range(args.requests)]


async def _once(model: str, prompt: str, output_tokens: int):
    sampling = {"max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
    values = {
        "text_input": np.array([prompt.encode()], dtype=np.object_),
        "sampling_parameters": np.array([json.dumps(sampling).encode()], dtype=np.object_),
        **{name: np.array([True]) for name in ("stream", "return_num_input_tokens", "return_num_output_tokens")},
    }
    inputs = []
    for name, value in values.items():
        inputs.append(grpc.InferInput(name, [1], "BOOL" if value.dtype == bool else "BYTES"))
        inputs[-1].set_data_from_numpy(value)
    yield {"model_name": model, "inputs": inputs}


def _summary(clients: int, requests: list[Measured], seconds: float) -> Summary:
    good = [request for request in requests if not request.error]
    if not good:
        raise SystemExit(f"all {len(requests)} requests failed, the first with: {requests[0].error}")
    ttft = [request.times[0] * 1e3 for request in good]
    gaps = [gap * 1e3 for request in good for gap in request.inter_token] or [0.0]
    return Summary(
        concurrency=clients,
        requests=len(requests),
        errors=len(requests) - len(good),
        input_tokens=float(np.mean([request.input_tokens for request in good])),
        output_tokens_per_s=sum(sum(request.tokens) for request in good) / seconds,
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p99=float(np.percentile(ttft, 99)),
        inter_token_p50=float(np.percentile(gaps, 50)),
        inter_token_p99=float(np.percentile(gaps, 99)),
        e2e_p50=float(np.percentile([request.times[-1] * 1e3 for request in good], 50)),
    )


def _print_table(summaries: list[Summary]) -> None:
    names = list(asdict(summaries[0]))
    print(" | ".join(names))
    for summary in summaries:
        print(" | ".join(f"{value:.1f}".rstrip("0").rstrip(".") for value in asdict(summary).values()))


if __name__ == "__main__":
    main()
