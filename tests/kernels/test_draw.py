"""The draw on a GPU: the noise, the filters, and the tokens that the CPU's sampler draws."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from backend_lib.worker.eager_sampling import EagerSampling
from backend_lib.worker.sampling import RowParams, SamplingBatch, StartedRows
from backend_lib.worker.sequence import Sequence
from kernels import draw as draw_module
from kernels import filters
from kernels.draw import DrawWorkspace, draw, noise_of, reference_draw
from kernels.philox import gumbel_noise
from kernels.tuning import Config
from tests.support.poison import poisoned

# The interpreter's numpy tells of infinities, which are meant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
CLOSE = 1e-5  # a token whose better ones have so nearly top_p of the mass may be kept or not


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows take several, and the last one is not full."""
    monkeypatch.setattr(filters, "_config", lambda vocab_size: Config({"BLOCK": 64, "PIVOTS": 8}, 4, 1))
    monkeypatch.setattr(draw_module, "_config", lambda vocab_size: Config({"BLOCK": 64}, 4, 1))
    monkeypatch.setattr(draw_module, "_SMALLEST_BLOCK", 64)


@triton.jit
def _noise_kernel(seed, sequence, position, out, start, BLOCK: tl.constexpr):
    values = noise_of(tl.load(seed), tl.load(sequence), tl.load(position), start, BLOCK)
    tl.store(out + tl.arange(0, BLOCK), values)


SEEDS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, -1, 2**63 - 1, -(2**63)]))


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(0, 2**31), st.integers(0, 2**40), st.integers(0, 3))
def test_noise_is_the_cpus_bit_for_bit(seed: int, sequence: int, position: int, block: int) -> None:
    stream = [torch.tensor([each]) for each in (seed, sequence, position)]
    found = torch.empty(64)
    _noise_kernel[(1,)](*stream, found, 64 * block, 64)
    expected = gumbel_noise(*stream, 64 * (block + 1))[0, 64 * block :]
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def params_of(rows: list[dict]) -> RowParams:
    """The row before them and the row after them are rubbish."""
    started = StartedRows.of([sequence_of(row, fields) for row, fields in enumerate(rows, start=1)])
    floats = torch.full((3, len(rows) + 2), math.nan)
    ints = torch.full((3, len(rows) + 2), -7)
    floats[:, 1:-1], ints[:, 1:-1] = started.floats, started.ints
    return RowParams(*floats, *ints)


def sequence_of(row: int, fields: dict) -> Sequence:
    nothing = torch.empty(0, dtype=torch.int32).numpy()
    sequence = Sequence(
        slot=row, generation=1, prompt_ids=nothing, output_ids=nothing, max_tokens=9, rules=None, **fields
    )
    sequence.row = row
    return sequence


def drawn(logits: torch.Tensor, fields: list[dict], positions: list[int]) -> list[int]:
    """By the kernels; the rows of parameters are in another order than the logits."""
    count, params = len(fields), params_of(fields[::-1])
    rows, given_logits = torch.arange(count, 0, -1), poisoned(logits.reshape(1, -1))
    out, workspace = torch.full((count + 2,), -3), DrawWorkspace(count, logits.shape[1], CPU)
    draw(given_logits.view.view_as(logits), rows, torch.tensor(positions), params, workspace, out=out[1:-1])
    assert out[0] == out[-1] == -3 and torch.equal(given_logits.view.view_as(logits), logits)
    check = torch.empty(count, dtype=torch.int64)
    reference_draw(logits, rows, torch.tensor(positions), params, workspace, out=check)
    found = out[1:-1].tolist()
    if not any(fields_of_one.get("top_k") or fields_of_one.get("top_p", 1) < 1 for fields_of_one in fields):
        assert found == check.tolist()
    return found


def drawn_on_cpu(logits: torch.Tensor, fields: list[dict], positions: list[int]) -> list[int]:
    sequences = [sequence_of(row, each) for row, each in enumerate(fields, start=1)]
    batch = SamplingBatch.of(sequences, positions, logits.shape[1])
    return EagerSampling().draw(logits.clone(), params_of(fields), batch).tolist()


def is_close(logits: torch.Tensor, fields: dict) -> bool:
    """Whether rounding decides what top-p keeps of [V] logits. Without top_p the CPU drops what has all of the mass
    before it, as far as float32 can tell, and that is not drawn in practice."""
    if fields["temperature"] == 0 or fields["top_p"] == 1:
        return False
    scores = logits.double() / fields["temperature"]
    order = scores.sort(descending=True, stable=True).indices[: fields["top_k"] or None]
    least = scores[order[0]] + (math.log(fields["min_p"]) if fields["min_p"] else -math.inf)
    mass = scores[order][scores[order] >= least].softmax(0)
    return bool(((mass.cumsum(0) - mass - fields["top_p"]).abs() < CLOSE).any())


FIELDS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5, 1e-3]),
        "top_k": st.sampled_from([0, 0, 1, 2, 7, 49, 1000]),
        "top_p": st.sampled_from([1.0, 1.0, 1e-6, 0.31, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
        "seed": st.integers(0, 2**64 - 1),
        "sequence_index": st.integers(0, 3),
    }
)
# How logits are spread: all different, many equal, as in 16 bits, tiny, huge, all equal.
SPREADS = ("normal", "few", "bfloat16", "zeros", "tiny", "huge", "equal")


def logits_of(spread: str, count: int, vocab_size: int, banned: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, vocab_size, generator=generator) * 3
    logits = {
        "normal": normal, "few": (normal / 2).round(), "bfloat16": normal.bfloat16().float(),
        "zeros": torch.where(normal > 0, 0.0, -0.0), "tiny": normal * 1e-40, "huge": normal * 1e37,
        "equal": torch.full_like(normal, 1.5),
    }[spread]  # fmt: skip
    return logits.masked_fill(torch.rand(count, vocab_size, generator=generator) < banned, -torch.inf)


skipped = {"cases": 0, "close": 0}


@settings(max_examples=60, deadline=None)
@given(
    fields=st.lists(FIELDS, min_size=1, max_size=4), vocab_size=st.integers(1, 200), spread=st.sampled_from(SPREADS),
    banned=st.sampled_from([0.0, 0.0, 0.5, 0.98, 1.0]), seed=st.integers(0, 2**31), first=st.integers(0, 2**33),
)  # fmt: skip
def test_what_the_cpu_draws(
    fields: list[dict], vocab_size: int, spread: str, banned: float, seed: int, first: int
) -> None:
    logits = logits_of(spread, len(fields), vocab_size, banned, seed)
    positions = [first + place for place in range(len(fields))]
    found, expected = drawn(logits, fields, positions), drawn_on_cpu(logits, fields, positions)
    for place, each in enumerate(fields):
        skipped["cases"] += 1
        if is_close(logits[place], each):
            skipped["close"] += 1
        else:
            assert found[place] == expected[place], each
