"""Greedy tokens of the whole worker path, overlap and graphs included, beside transformers on the same checkpoint.

`debug: on`: a launch that waits for the device is an error. What transformers would have chosen is computed on our own
tokens, so that one difference does not hide what follows. In 16 bits both round, each in its own order: so where they
differ, the margin is told, in standard deviations of the logits, and float32 says who is nearer.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.bench import Bench
from benchmarks.device.folder import write_folder
from benchmarks.device.model import Engine, settings_for
from benchmarks.device.report import Sheet
from benchmarks.device.requests import Requests, run_until_over

MARGIN = 0.1  # standard deviations of the logits by which transformers may prefer another token


def run(sheet: Sheet, bench: Bench) -> None:
    sheet.attempt("checkpoint", _write, bench, needs=20)
    generated = sheet.attempt("worker", _generate, bench, needs=30)
    bench.drop_engine()
    if generated is None:
        return
    sheet.attempt("beside transformers", _compare, bench, sheet.items["worker"], needs=15)


def _folder(bench: Bench) -> Path:
    return bench.folder / "small"


def _write(bench: Bench) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {name: value for name, value in bench.scale.small.items() if name != "architectures"}
    # A wide initialisation, so that logits differ by more than rounding.
    model = LlamaForCausalLM(LlamaConfig(**config, initializer_range=0.05)).to(bench.scale.dtype)
    folder = write_folder(_folder(bench), bench.scale.small)
    (folder / "model.safetensors").unlink()
    tokenizer = (folder / "tokenizer.json").read_bytes()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    return {"MB": sum(each.stat().st_size for each in folder.glob("*.safetensors")) / 1e6}


def _generate(bench: Bench) -> dict[str, Any]:
    """Prompts of many lengths that arrive while others decode."""
    count, num_tokens = bench.scale.compared
    rng, longest = random.Random(1), bench.scale.prefill_chunk // 2 + 8
    rows = min(bench.scale.max_running, count)
    settings = settings_for(
        bench.scale, bench.gpu, _folder(bench), debug="on", max_running=rows,
        kv_tokens=count * (longest + num_tokens + 2), prefill_chunk=max(longest // 3, 4),
    )  # fmt: skip
    engine = Engine(settings, longest + num_tokens + 1, num_slots=count)
    requests = Requests(engine.arena)
    vocab_size = bench.scale.small["vocab_size"]
    prompts = [[rng.randrange(2, vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)]
    placed = [requests.place(prompt, num_tokens) for prompt in prompts]
    for each in placed[: count // 2]:
        requests.post(each)
    for _ in range(3):
        engine.loop.run_once()
    for each in placed[count // 2 :]:
        requests.post(each)
    run_until_over(engine, requests, placed)
    outputs = [requests.output(each) for each in placed]
    whole = all(len(output) == num_tokens for output in outputs)
    return {"ok": whole, "tokens": sum(map(len, outputs)), "prompts": prompts, "outputs": outputs}


@torch.inference_mode()
def _compare(bench: Bench, generated: dict[str, Any]) -> dict[str, Any]:
    theirs, exact = (_logits(bench, generated, dtype) for dtype in (bench.scale.dtype, torch.float32))
    ours = [torch.tensor(output) for output in generated["outputs"]]
    found = {"tokens": sum(map(len, ours)), "first difference": None, "differ": 0, "largest margin": 0.0}
    for number, (output, logits) in enumerate(zip(ours, theirs, strict=True)):
        margins = _margins(logits, output)
        for place in margins.nonzero()[:, 0].tolist():
            where = f"sequence {number}, token {place}, {margins[place]:.4f}"
            found["first difference"] = found["first difference"] or where
            found["differ"] += 1
        found["largest margin"] = max(found["largest margin"], float(margins.max()))
    found["differ from float32"] = sum(int((_margins(*each) > 0).sum()) for each in zip(exact, ours, strict=True))
    found["theirs from float32"] = sum(
        int((_margins(logits, other.argmax(-1)) > 0).sum()) for logits, other in zip(exact, theirs, strict=True)
    )
    return {"ok": found["largest margin"] <= MARGIN} | found


def _logits(bench: Bench, generated: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    """Of each output token, from what came before it, float32 on the CPU."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(_folder(bench), dtype=dtype).to(bench.gpu.device)
    found = []
    for prompt, output in zip(generated["prompts"], generated["outputs"], strict=True):
        ids = torch.tensor([prompt + output[:-1]], device=bench.gpu.device)
        found.append(model(ids).logits[0, len(prompt) - 1 :].float().cpu())
    return found


def _margins(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """By how many standard deviations the best logit is above that of the chosen token."""
    gap = logits.amax(-1) - logits.gather(1, token_ids[:, None])[:, 0]
    return gap / logits.std(-1)
