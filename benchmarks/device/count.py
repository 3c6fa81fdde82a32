"""Launches and bytes of a decode step, counted without a GPU.

Launches are counted as a small model computes a step in Triton's interpreter: kernels of ours, and operations of torch
that are not views. Bytes are worked out from the shape; keys, values and weights once, and all that is written and read
again between the products.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

BATCHES, CONTEXTS = (1, 16, 64, 256), (128, 2048, 8192)
_FREE = ("aten::empty", "aten::_unsafe_view", "aten::detach", "aten::alias")


class Pass(NamedTuple):
    """One launch: bytes of activations that it reads and writes, for each row."""

    name: str
    num_bytes: int


def layer_passes(config: dict[str, Any]) -> list[Pass]:
    """Of one layer, in order. Hidden states are float32, the rest has 2 bytes."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * dim, 2 * config["num_key_value_heads"] * dim
    norm = Pass("add_norm", (4 + 4 + 2 + 2) * hidden)
    return [
        norm, Pass("qkv", 2 * (hidden + query + key_value)),
        Pass("place_heads", 2 * (2 * query + 2 * key_value)),
        Pass("attention", 2 * query + 4 * query), Pass("merge", 4 * query + 2 * query),
        Pass("output", 2 * (query + hidden)), norm, Pass("gate_up", 2 * (hidden + 2 * inner)),
        Pass("gated", 2 * 3 * inner), Pass("down", 2 * (inner + hidden)),
    ]  # fmt: skip


def step_bytes(config: dict[str, Any], rows: int, context: int) -> dict[str, float]:
    """`other`: activations, at one item for a row and key-value head, and logits, which are copied once."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config["head_dim"]
    per_layer = heads + config["num_attention_heads"] * config["head_dim"] + 3 * config["intermediate_size"]
    weights = 2 * hidden * (layers * per_layer + config["vocab_size"])
    kv = rows * context * layers * 4 * config["num_key_value_heads"] * config["head_dim"]
    logits = 4 * 3 * config["vocab_size"]  # written by the head, copied to where the sampler finds them
    other = rows * (layers * sum(each.num_bytes for each in layer_passes(config)) + logits)
    return {"weights": weights, "kv": kv, "other": other, "other share": other / (weights + kv + other)}


def launches(layers: int) -> Counter[str]:
    """By name, of a decode step of the small model with so many layers."""
    from benchmarks.device import bench as benches
    from benchmarks.device import gpu, report, scale

    config = scale.TINY | {"num_hidden_layers": layers}
    with tempfile.TemporaryDirectory() as folder:
        bench = benches.Bench(replace(scale.DRY, large=config), gpu.Cpu(), report.Report(Path(folder, "none.json")))
        with mock.patch("backend_lib.worker.machine.warm_up", lambda *arguments, **named: 0.0):
            steps = bench.steps()
        batch = steps.decode_batch(2, 8)
        with counted() as found:
            steps.decoder.forward(batch, steps.kv)
    return found


@contextmanager
def counted() -> Iterator[Counter[str]]:
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from triton.runtime.interpreter import GridExecutor

    found: Counter[str] = Counter()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            aliases = [each.alias_info for each in func._schema.returns]
            is_view = any(alias is not None and not alias.is_write for alias in aliases)
            if not is_view and not func._schema.name.startswith(_FREE):
                found[func._schema.name] += 1
            return func(*args, **(kwargs or {}))

    launch = GridExecutor.__call__

    def counting(self: Any, *arguments: Any, **constants: Any) -> Any:
        found[self.fn.__name__] += 1
        with _disable_current_modes():
            return launch(self, *arguments, **constants)

    with mock.patch.object(GridExecutor, "__call__", counting), Operations():
        yield found


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.device.scale import LLAMA_8B
    from benchmarks.formats.report import markdown_table

    one, two = launches(1), launches(2)
    per_layer, layers = two - one, LLAMA_8B["num_hidden_layers"]
    whole = one.total() - per_layer.total() + layers * per_layer.total()
    print("Llama-3.1-8B, bf16: a decode step, without its draw\n")
    print(f"{per_layer.total()} launches a layer, {whole} in all\n")
    rows = [[name, str(count), str(one[name] - count)] for name, count in per_layer.items()]
    rest = [[name, "0", str(count)] for name, count in (one - per_layer).items() if name not in per_layer]
    print(markdown_table([["launch", "a layer", "beside the layers"], *rows, *rest]))
    head = ["rows", "context", "weights GB", "keys and values GB", "other GB", "share of other"]
    print()
    print(markdown_table([head, *(_line(LLAMA_8B, batch, context) for context in CONTEXTS for batch in BATCHES)]))


def _line(config: dict[str, Any], rows: int, context: int) -> list[str]:
    found = step_bytes(config, rows, context)
    sizes = [f"{found[name] / 1e9:.3f}" for name in ("weights", "kv", "other")]
    return [str(rows), str(context), *sizes, f"{100 * found['other share']:.2f} %"]
