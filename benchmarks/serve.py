"""Load on a running server over gRPC streaming: throughput, time to first token, inter-token and end-to-end latency.

    make serve                                                # in another terminal
    python benchmarks/serve.py --concurrency 1 8 32           # closed loop: so many clients, each waits for its answer
    python benchmarks/serve.py --rate 2 4 8 --duration 60     # open loop: Poisson arrivals, so many requests a second

docs/benchmarking.md says what each figure means.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run as a file, which puts only its own folder on the path
        sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.serving.cli import main

    sys.exit(main(description=__doc__))
