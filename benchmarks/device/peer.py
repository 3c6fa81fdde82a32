"""transformers beside it, in the same run: the same shape and type, static cache, sdpa; in a CUDA graph, if it can."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.device.bench import Bench
from benchmarks.device.report import Sheet

_ROOM = 32 << 30  # bytes of another copy of the weights, and caches


@torch.inference_mode()
def run(sheet: Sheet, bench: Bench) -> None:
    if bench.gpu.free_bytes() < _ROOM:
        bench.drop_engine()
    holder: dict[str, Any] = {}
    sheet.attempt("load", _load, bench, holder, needs=30)
    if "model" not in holder:
        return
    for context in bench.scale.peer_contexts:
        for rows in bench.scale.peer_batches:
            sheet.attempt(f"{rows} x {context}", _decode, bench, holder["model"], rows, context, needs=8)
            name = f"{rows} x {context}, in a graph"
            sheet.attempt(name, _decode_in_graph, bench, holder["model"], rows, context, needs=10)
    sheet.attempt(f"prompt of {bench.scale.prompts[0]}", _prompt, bench, holder["model"], needs=10)
    holder.clear()
    gc.collect()
    bench.gpu.free_bytes()


def _load(bench: Bench, holder: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**{name: value for name, value in bench.scale.large.items() if name != "architectures"})
    with torch.device(bench.gpu.device):
        model = AutoModelForCausalLM.from_config(config, dtype=bench.scale.dtype, attn_implementation="sdpa").eval()
    holder["model"] = model
    return {"weights": sum(each.numel() for each in model.parameters())}


class _Row:
    """A batch that decodes one token again and again at the end of its context."""

    def __init__(self, bench: Bench, model: Any, rows: int, context: int) -> None:
        from transformers import StaticCache

        where = bench.gpu.device
        self.cache = StaticCache(config=model.config, max_cache_len=context + 512)
        ids = torch.randint(model.config.vocab_size, (rows, context - 1), device=where)
        model(input_ids=ids, past_key_values=self.cache, logits_to_keep=1)
        self.token = torch.randint(model.config.vocab_size, (rows, 1), device=where)
        self.positions = torch.full((rows, 1), context - 1, device=where)
        self.model = model

    def step(self) -> None:
        self.model(input_ids=self.token, past_key_values=self.cache, position_ids=self.positions)


def _decode(bench: Bench, model: Any, rows: int, context: int) -> dict[str, float]:
    batch = _Row(bench, model, rows, context)
    return _times(bench, batch.step, rows, least=0.0)  # each step makes the context one longer


def _decode_in_graph(bench: Bench, model: Any, rows: int, context: int) -> dict[str, Any]:
    batch = _Row(bench, model, rows, context)
    try:
        replay = bench.gpu.capture(batch.step)
    except RuntimeError as error:
        return {"skipped": f"it cannot be captured: {error}"[:300]}
    return _times(bench, replay, rows, least=0.0)


def _times(bench: Bench, step: Callable[[], Any], rows: int, *, least: float) -> dict[str, float]:
    def many() -> None:
        for _ in range(10):
            step()

    seconds = bench.gpu.seconds(many, least=least) / 10
    return {"ms": seconds * 1e3, "tokens/s": rows / seconds}


def _prompt(bench: Bench, model: Any) -> dict[str, float]:
    length = bench.scale.prompts[0]
    ids = torch.randint(model.config.vocab_size, (1, length), device=bench.gpu.device)
    seconds = bench.gpu.seconds(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1))
    return {"ms": seconds * 1e3, "tokens/s": length / seconds}
