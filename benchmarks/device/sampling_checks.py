"""The kernels of a draw and of a step's inputs, against their references and the CPU's sampler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from backend_lib.worker.eager_sampling import EagerSampling
from backend_lib.worker.sampling import RowParams, SamplingBatch, StartedRows
from backend_lib.worker.sequence import Sequence
from benchmarks.device.bench import Bench
from benchmarks.device.guarded import Guarded, close, joined, same
from kernels.draw import DrawWorkspace, draw, noise_of
from kernels.filters import find_cuts, reference_find_cuts
from kernels.logit_rules import add_at, apply_masks, reference_add_at, reference_apply_masks
from kernels.logprobs import logprob_stats, reference_logprob_stats
from kernels.penalties import apply_penalties, count_tokens, reference_apply_penalties, reference_count_tokens
from kernels.philox import gumbel_noise
from kernels.relay import reference_scatter_ids, reference_stage_inputs, scatter_ids, stage_inputs

Verdict = dict[str, Any]

# L rows of logits · V vocabulary · R rows of sequences

# What is asked of a draw; rows take one after another.
KINDS: tuple[dict[str, Any], ...] = (
    {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 40}, {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.8, "min_p": 0.02}, {"temperature": 0.9, "min_p": 0.05},
)  # fmt: skip


@triton.jit
def _noise_kernel(seeds, sequences, positions, out, V: tl.constexpr, BLOCK: tl.constexpr):
    row, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    values = noise_of(tl.load(seeds + row), tl.load(sequences + row), tl.load(positions + row), start, BLOCK)
    token = start + tl.arange(0, BLOCK)
    tl.store(out + row * V + token, values, mask=token < V)


def noise(bench: Bench) -> Verdict:
    """Bit for bit, but for a value in 10^8 that another logarithm rounds to the other side."""
    where, rows, vocab_size = bench.gpu.device, bench.scale.rows, bench.scale.large["vocab_size"]
    seeds = torch.randint(-(1 << 62), 1 << 62, (rows,))
    sequences, positions = torch.randint(0, 9, (rows,)), torch.randint(0, 1 << 33, (rows,))
    found = Guarded(rows, vocab_size, dtype=torch.float32, device=where)
    grid = rows, triton.cdiv(vocab_size, 1024)
    _noise_kernel[grid](*(each.to(where) for each in (seeds, sequences, positions)), found.view, vocab_size, 1024)
    verdict = same(found.view, gumbel_noise(seeds, sequences, positions, vocab_size), found)
    return verdict | {"ok": verdict["wrong"] <= 2 and verdict["intact"]}


def draws(bench: Bench) -> Verdict:
    """Ids against those of the CPU. Where they differ in a row with filters, a token may lie on the edge of top-p."""
    where, count = bench.gpu.device, bench.scale.rows
    fields = [KINDS[place % len(KINDS)] for place in range(count)]
    sequences = [_sequence(row, each) for row, each in enumerate(fields)]
    params, positions = _params(sequences), torch.randint(0, 9000, (count,))
    logits = 3 * torch.randn(count, bench.scale.large["vocab_size"])
    batch = SamplingBatch.of(sequences, positions.tolist(), logits.shape[1])
    expected = EagerSampling().draw(logits.clone(), params, batch)
    out = Guarded(count, dtype=torch.int64, device=where)
    device_logits, before = logits.to(where), logits.clone()
    draw(
        device_logits, torch.arange(count, device=where), positions.to(where), _moved(params, where),
        DrawWorkspace(count, logits.shape[1], where), out=out.view,
    )  # fmt: skip
    verdict = same(out.view, expected, out)
    edge = [place for place in (out.view.cpu() != expected).nonzero()[:, 0].tolist() if fields[place].get("top_p")]
    return verdict | {
        "ok": verdict["wrong"] == len(edge) <= 1 and verdict["intact"] and torch.equal(device_logits.cpu(), before),
        "on the edge of top-p": len(edge),
    }


def filters(bench: Bench) -> Verdict:
    where, count = bench.gpu.device, min(bench.scale.rows, len(KINDS))
    params = _params([_sequence(row, KINDS[row]) for row in range(count)])
    logits = 3 * torch.randn(count, bench.scale.large["vocab_size"])
    found = [Guarded(count, dtype=torch.int32, device=where) for _ in range(2)]
    expected = [torch.zeros(count, dtype=torch.int32) for _ in range(2)]
    rows = torch.arange(count)
    reference_find_cuts(logits, rows, params, cut_keys=expected[0], last_ids=expected[1])
    find_cuts(logits.to(where), rows.to(where), _moved(params, where), cut_keys=found[0].view, last_ids=found[1].view)
    # Several ids may name the same end of the order, and one token on the edge of top-p may fall on either side.
    off = (found[0].view.cpu().long() - expected[0].long()).abs()
    wrong = int((off > 1 << 12).sum())
    return {"ok": not wrong and all(each.is_whole for each in found), "wrong": wrong, "of": count}


def rules(bench: Bench) -> Verdict:
    where, rows, vocab_size = bench.gpu.device, bench.scale.rows, bench.scale.large["vocab_size"]
    logits = torch.randn(rows, vocab_size)
    places = torch.randperm(rows)[: max(rows // 2, 1)]
    masks = torch.randint(-(1 << 31), 1 << 31, (len(places), -(-vocab_size // 32)), dtype=torch.int64).int()
    found = Guarded(rows, vocab_size, dtype=torch.float32, device=where)
    found.view.copy_(logits)
    reference_apply_masks(logits, places, masks)
    apply_masks(found.view, places.to(where), masks.to(where))
    first = same(found.view, logits, found)
    flat = torch.randperm(rows * vocab_size)[:200]
    at, values = torch.stack([flat // vocab_size, flat % vocab_size]), torch.randn(len(flat))
    values[::3] = -torch.inf
    reference_add_at(logits, at, values)
    add_at(found.view, at.to(where), values.to(where))
    return joined(first, same(found.view, logits, found))


def penalties(bench: Bench) -> Verdict:
    where, rows, vocab_size = bench.gpu.device, bench.scale.rows, bench.scale.large["vocab_size"]
    logits, factors = torch.randn(rows, vocab_size), torch.rand(rows, 3) + 0.5
    counts, in_prompt = torch.randint(0, 3, (rows, vocab_size)).int(), torch.rand(rows, vocab_size) < 0.1
    places, sequences = torch.randperm(rows)[: max(rows // 2, 1)], torch.randperm(rows)[: max(rows // 2, 1)]
    found, token_ids = (
        Guarded(rows, vocab_size, dtype=torch.float32, device=where),
        torch.randint(vocab_size, places.shape),
    )
    found.view.copy_(logits)
    device = [each.to(where) for each in (places, sequences, factors, counts, in_prompt)]
    reference_apply_penalties(logits, places, sequences, factors, counts, in_prompt)
    apply_penalties(found.view, *device)
    reference_count_tokens(token_ids, sequences, counts)
    count_tokens(token_ids.to(where), device[1], device[3])
    return joined(close(found.view, logits, found), same(device[3], counts))


def logprobs(bench: Bench) -> Verdict:
    where, rows, vocab_size = bench.gpu.device, bench.scale.rows, bench.scale.large["vocab_size"]
    logits = (3 * torch.randn(rows, vocab_size)).masked_fill(torch.rand(rows, vocab_size) < 0.2, -torch.inf)
    token_ids = logits.argmax(1).where(torch.rand(rows) < 0.3, (logits + 5 * torch.randn(rows, vocab_size)).argmax(1))
    found = [Guarded(rows, dtype=dtype, device=where) for dtype in (torch.float32, torch.float32, torch.int64)]
    exact = [torch.empty(rows, dtype=dtype) for dtype in (torch.float64, torch.float64, torch.int64)]
    names = ("chosen", "log_sum_exp", "ranks")
    reference_logprob_stats(logits, token_ids, **dict(zip(names, exact, strict=True)))
    views = {name: each.view for name, each in zip(names, found, strict=True)}
    logprob_stats(logits.to(where), token_ids.to(where), **views)
    parts = [close(each.view, expected, each) for each, expected in zip(found[:2], exact[:2], strict=True)]
    return joined(*parts, same(found[2].view, exact[2], found[2]))


def relay(bench: Bench) -> Verdict:
    where, decodes, prompt = bench.gpu.device, bench.scale.rows, bench.scale.prefill_chunk
    rows, padded, longest = decodes + 2, decodes + 5, prompt + 9
    token_rows = torch.cat([torch.randperm(rows - 1)[:decodes], torch.full((prompt,), rows - 1)])
    positions = torch.cat([torch.randint(0, longest, (decodes,)), torch.arange(prompt) + 4])
    index, ids = torch.randperm(1 << 20)[: decodes + prompt], torch.randint(1 << 17, (prompt,))
    newest, table = torch.randint(1 << 17, (rows + 1,)), torch.full((rows + 1, longest), -1, dtype=torch.int32)
    numbers = {"num_decodes": decodes, "padded": padded, "spare_row": rows, "spare_index": 1 << 20}
    expected = [torch.empty(padded + prompt, dtype=torch.int64) for _ in range(4)]
    found = [Guarded(padded + prompt, dtype=torch.int64, device=where) for _ in range(4)]
    inputs = token_rows, positions, index, ids, newest, table
    moved = [each.clone().to(where) for each in inputs]
    reference_stage_inputs(*inputs, *expected, **numbers)
    stage_inputs(*moved, *(each.view for each in found), **numbers)
    # What padding has for an id is nobody's business, but it must be one.
    expected[0][decodes:padded] = found[0].view[decodes:padded].cpu().clamp(0, 0)
    verdicts = [same(each.view, exact, each) for each, exact in zip(found, expected, strict=True)]
    token_ids, to = torch.randint(1 << 17, (decodes,)), torch.randperm(rows)[:decodes]
    reference_scatter_ids(token_ids, to, newest)
    scatter_ids(token_ids.to(where), to.to(where), moved[4])
    return joined(*verdicts, same(moved[5], table), same(moved[4], newest))


SAMPLING: dict[str, Callable[[Bench], Verdict]] = {
    "draw: noise": noise, "draw": draws, "filters": filters, "logit_rules": rules, "penalties": penalties,
    "logprobs": logprobs, "relay": relay,
}  # fmt: skip


def _sequence(row: int, fields: dict[str, Any]) -> Sequence:
    nothing = torch.empty(0, dtype=torch.int32).numpy()
    sequence = Sequence(
        slot=row, generation=1, prompt_ids=nothing, output_ids=nothing, max_tokens=9, seed=7919 * row + 5, **fields
    )
    sequence.row = row
    return sequence


def _params(sequences: list[Sequence]) -> RowParams:
    started = StartedRows.of(sequences)
    params = RowParams(*started.floats, *started.ints)
    assert params.log_min_p.max() <= 0 and not math.isnan(float(params.top_p.sum()))
    return params


def _moved(params: RowParams, device: torch.device) -> RowParams:
    return RowParams(*(each.to(device).contiguous() for each in params))
