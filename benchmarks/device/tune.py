"""Block sizes that are fastest here, kept in the user's cache for every worker that starts from now on, and what the
large model's decoding and prompts take with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.device import decode as speed
from benchmarks.device.bench import Bench
from benchmarks.device.kernel_checks import cache_of, queries_of
from benchmarks.device.report import Sheet
from kernels import decode_plan, prefill_attention, tuning
from kernels.decode_attention import DecodePlan, decode_attention, plan_decode
from kernels.tuning import Config

_AGAIN = 60  # seconds kept for the figures afterwards
Run = Callable[[Config], None]


@torch.inference_mode()
def run(sheet: Sheet, bench: Bench) -> None:
    with _cache(bench):
        for name, tuned in (("prefill_attention", _prefill), ("decode_attention", _decode)):
            sheet.attempt(name, tuned, bench, sheet, needs=_AGAIN + 20)
        tuning._found.cache_clear()  # it is read once in a process, and graphs hold what was chosen
        bench.drop_engine()
        speed.measure(sheet, bench, bench.scale.main)
        for length in bench.scale.prompts:
            sheet.attempt(f"prompt of {length}", speed.prompt, bench, length, needs=10)


def _decode(bench: Bench, sheet: Sheet) -> dict[str, Any]:
    shape, dtype = _shape(bench), bench.scale.dtype
    default = decode_plan.default_config(shape[2], dtype)
    candidates = decode_plan.candidates(shape[2])
    batches = [_DecodeBatch(bench, rows, context) for rows, context in bench.scale.tuned]

    def run(config: Config) -> None:
        for batch in batches:
            batch.attend(config)

    return _tuned(bench, sheet, "decode_attention", default, candidates, run, share=1.0)


class _DecodeBatch:
    """Rows of one length; a plan for each configuration is made when it first runs, outside the time."""

    def __init__(self, bench: Bench, rows: int, context: int) -> None:
        self._shape, self._dtype, where = _shape(bench), bench.scale.dtype, bench.gpu.device
        self._pool, self._table = cache_of(bench, [context] * rows, self._shape, self._dtype)
        self._rows = torch.arange(rows, device=where)
        self._positions = torch.full((rows,), context - 1, device=where)
        self._query = queries_of(rows, self._shape, self._dtype, where)
        self._out = self._query.new_empty(rows, self._shape[0] * self._shape[2])
        self._plan: tuple[Config, DecodePlan] | None = None

    def attend(self, config: Config) -> None:
        plan, rows = self._plan_for(config), self._rows
        scale = self._shape[2] ** -0.5
        decode_attention(
            self._query, self._pool, self._table, rows, self._positions, plan, scale=scale, out=self._out
        )  # fmt: skip

    def _plan_for(self, config: Config) -> DecodePlan:
        if self._plan is None or self._plan[0] != config:
            multiprocessors = None if self._query.is_cuda else 2
            plan = DecodePlan.allocate(
                len(self._rows), self._shape, dtype=self._dtype, device=self._query.device,
                multiprocessors=multiprocessors, config=config,
            )  # fmt: skip
            plan_decode(self._positions, plan, window=None)
            self._plan = config, plan
        return self._plan[1]


def _prefill(bench: Bench, sheet: Sheet) -> dict[str, Any]:
    shape, dtype, most = _shape(bench), bench.scale.dtype, bench.scale.prefill_chunk
    sm = bench.gpu.description().get("sm", 80)
    default = prefill_attention.default_config(shape[2], dtype, sm)
    pool, table = cache_of(bench, [2 * most], shape, dtype)
    chunks = torch.tensor([[0, 0, most, 2 * most]], dtype=torch.int32, device=bench.gpu.device)
    query = queries_of(most, shape, dtype, bench.gpu.device)
    out = query.new_empty(most, shape[0] * shape[2])

    def run(config: Config) -> None:
        prefill_attention.prefill_attention(
            query, pool, table, chunks, max_query_len=most, scale=shape[2] ** -0.5, out=out, config=config
        )

    return _tuned(bench, sheet, "prefill_attention", default, prefill_attention.candidates(), run, share=0.4)


def _tuned(
    bench: Bench, sheet: Sheet, kernel: str, default: Config, candidates: list[Config], run: Run, *, share: float
) -> dict[str, Any]:
    """`share`: of the time that is left for tuning."""
    until = time.monotonic() + share * (sheet.seconds_left - _AGAIN)
    others = sorted((each for each in candidates if each != default), key=lambda each: _distance(each, default))
    ran: set[str] = set()

    def timed(config: Config) -> None:
        run(config)
        ran.add(str(config))

    in_time = (each for number, each in enumerate([default, *others]) if _may_go_on(bench, number, until))
    best = tuning.tune(kernel, f"{_shape(bench)[2]} {bench.scale.dtype}", in_time, timed, _timer(bench))
    before, after = (bench.gpu.seconds(lambda each=each: run(each)) for each in (default, best))
    return {
        "ran": len(ran), "of": len(candidates), "default us": before * 1e6, "best us": after * 1e6,
        "default": str(default), "best": str(best),
    }  # fmt: skip


def _may_go_on(bench: Bench, number: int, until: float) -> bool:
    """The default is always tried. Without a GPU, one more."""
    return number == 0 or (time.monotonic() < until and (bench.gpu.device.type == "cuda" or number < 2))


def _timer(bench: Bench) -> tuning.Timer | None:
    return None if bench.gpu.device.type == "cuda" else bench.gpu.seconds


def _distance(config: Config, default: Config) -> int:
    """In how many respects it is another."""
    same = [config.blocks[name] == value for name, value in default.blocks.items()]
    return [*same, config.num_warps == default.num_warps, config.num_stages == default.num_stages].count(False)


@contextmanager
def _cache(bench: Bench) -> Iterator[None]:
    """Without a GPU, a file of our own."""
    if bench.gpu.device.type == "cuda":
        yield
        return
    with mock.patch.object(tuning, "_path", lambda: Path(bench.folder, "tuned.json")):
        yield


def _shape(bench: Bench) -> tuple[int, int, int]:
    config = bench.scale.large
    return config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
