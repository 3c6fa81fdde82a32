"""Tandem and other engines side by side: the same machine, model, prompts and number of threads, in one run.

    python benchmarks/peers.py --install                      # each engine in an environment of its own; takes a while
    python benchmarks/peers.py --run                          # Tandem, llama.cpp, onnxruntime-genai, OpenVINO GenAI
    python benchmarks/peers.py --run tandem:weights=fp32 vllm-fp32 transformers-fp32 --repeats 5

docs/benchmarking.md says what the figures mean.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if not __package__:  # run as a file, which puts only its own folder on the path
        sys.path.insert(0, str(Path(__file__).parents[1]))
    from benchmarks.rivals.cli import main

    sys.exit(main(description=__doc__))
