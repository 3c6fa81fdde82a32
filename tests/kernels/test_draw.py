"""The draw on a GPU: the noise, the filters, and the tokens that the CPU's sampler draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

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
from kernels.filters import find_cuts, reference_find_cuts, reference_keys, reference_masses
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

POSITIONS = st.one_of(st.integers(0, 2**40), st.sampled_from([0, 2**32 - 1, 2**32, 2**40 + 5]))


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(0, 2**31), POSITIONS, st.integers(0, 3))
def test_noise_is_the_cpus_bit_for_bit(seed: int, sequence: int, position: int, block: int) -> None:
    stream = [torch.tensor([each]) for each in (seed, sequence, position)]
    found = torch.empty(64)
    _noise_kernel[(1,)](*stream, found, 64 * block, 64)
    expected = gumbel_noise(*stream, 64 * (block + 1))[0, 64 * block :]
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def params_of(rows: list[dict]) -> RowParams:
    """The row before them and the row after them are rubbish."""
    started = StartedRows.of([sequence_of(row, fields) for row, fields in enumerate(rows, start=1)])
    floats, ints = torch.full((3, len(rows) + 2), math.nan), torch.full((3, len(rows) + 2), -7)
    floats[:, started.rows], ints[:, started.rows] = started.floats, started.ints
    return RowParams(*floats, *ints)


def sequence_of(row: int, fields: dict) -> Sequence:
    nothing = torch.empty(0, dtype=torch.int32).numpy()
    sequence = Sequence(
        slot=row, generation=1, prompt_ids=nothing, output_ids=nothing, max_tokens=9, rules=None, **fields
    )
    sequence.row = row
    return sequence


def drawn(logits: torch.Tensor, fields: list[dict], positions: list[int], run: Callable = draw) -> list[int]:
    """The rows of parameters are in another order than the logits."""
    count, params = len(fields), params_of(fields[::-1])
    rows, around = torch.arange(count, 0, -1), poisoned(logits.reshape(1, -1))
    found, workspace = torch.full((count + 2,), -3), DrawWorkspace(count, logits.shape[1], CPU)
    run(around.view.view_as(logits), rows, torch.tensor(positions), params, workspace, out=found[1:-1])
    assert found[0] == found[-1] == -3 and torch.equal(around.view.view_as(logits).nan_to_num(7), logits.nan_to_num(7))
    return found[1:-1].tolist()


def kept(logits: torch.Tensor, fields: list[dict], run: Callable) -> list[list[int]]:
    """Which tokens of each row the filters leave, but for those that are never drawn."""
    cuts, token = torch.zeros((2, len(fields)), dtype=torch.int32), torch.arange(logits.shape[1])
    run(logits, torch.arange(1, len(fields) + 1), params_of(fields), cut_keys=cuts[0], last_ids=cuts[1])
    left = []
    for row, each, (cut_key, last_id) in zip(logits, fields, cuts.T, strict=True):
        key = reference_keys(row / each["temperature"] if each["temperature"] else row)
        is_kept = (key > cut_key) | ((key == cut_key) & (token <= last_id))
        left.append(token[is_kept & (row > -torch.inf)].tolist())
    return left


def drawn_on_cpu(logits: torch.Tensor, fields: list[dict], positions: list[int]) -> list[int]:
    sequences = [sequence_of(row, each) for row, each in enumerate(fields, start=1)]
    batch = SamplingBatch.of(sequences, positions, logits.shape[1])
    return EagerSampling().draw(logits.clone(), params_of(fields), batch).tolist()


def is_close(logits: torch.Tensor, fields: dict) -> bool:
    """Whether rounding decides what top-p keeps of [V] logits. Without top_p the CPU drops what has all of the mass
    before it, as far as float32 can tell, and that is not drawn in practice."""
    if fields["temperature"] == 0 or fields["top_p"] == 1:
        return False
    scores = logits / fields["temperature"]
    order = scores.sort(descending=True, stable=True).indices[: fields["top_k"] or None]
    least = scores[order[0]] + (math.log(fields["min_p"]) if fields["min_p"] else -math.inf)
    mass = reference_masses(scores[order][~(scores[order] < least)])
    return bool(((mass.cumsum(0)[:-1] - fields["top_p"]).abs() < CLOSE).any())


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


class Case(NamedTuple):
    fields: list[dict]
    vocab_size: int
    spread: str
    banned: float
    seed: int


CASES = st.builds(
    Case, st.lists(FIELDS, min_size=1, max_size=3), st.integers(1, 150), st.sampled_from(SPREADS),
    st.sampled_from([0.0, 0.0, 0.5, 0.98, 1.0]), st.integers(0, 2**31),
)  # fmt: skip


def logits_of(case: Case) -> torch.Tensor:
    generator, shape = torch.Generator().manual_seed(case.seed), (len(case.fields), case.vocab_size)
    normal = torch.randn(shape, generator=generator) * 3
    logits = {
        "normal": normal, "few": (normal / 2).round(), "bfloat16": normal.bfloat16().float(),
        "zeros": torch.where(normal > 0, 0.0, -0.0), "tiny": normal * 1e-40, "huge": normal * 1e37,
        "equal": torch.full_like(normal, 1.5),
    }[case.spread]  # fmt: skip
    return logits.masked_fill(torch.rand(shape, generator=generator) < case.banned, -torch.inf)


class Close:
    """Rows that prove nothing, as rounding decides what is kept, are left out; they must be few."""

    def __init__(self) -> None:
        self.rows, self.left_out = 0, 0

    def compare(self, logits: torch.Tensor, fields: list[dict], found: list, expected: list) -> None:
        for row, each, one, other in zip(logits, fields, found, expected, strict=True):
            self.rows += 1
            if is_close(row, each):
                self.left_out += 1
            else:
                assert one == other, each


def test_what_the_cpu_draws() -> None:
    close = Close()

    @settings(max_examples=30, deadline=None)
    @given(CASES, st.integers(0, 2**33))
    def check(case: Case, first: int) -> None:
        logits, positions = logits_of(case), [first + place for place in range(len(case.fields))]
        found, expected = drawn(logits, case.fields, positions), drawn_on_cpu(logits, case.fields, positions)
        close.compare(logits, case.fields, found, expected)
        by_reference = drawn(logits, case.fields, positions, reference_draw)
        close.compare(logits, case.fields, found, by_reference)

    check()
    assert close.left_out * 20 < close.rows, close.left_out


def test_the_filters_leave_what_sorting_leaves() -> None:
    close = Close()

    @settings(max_examples=30, deadline=None)
    @given(CASES)
    def check(case: Case) -> None:
        logits = logits_of(case)
        found, expected = (kept(logits, case.fields, run) for run in (find_cuts, reference_find_cuts))
        close.compare(logits, case.fields, found, expected)

    check()
    assert close.left_out * 20 < close.rows, close.left_out


DRAWN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5, "sequence_index": 0}


def test_rows_and_blocks_as_large_as_in_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    fields = [DRAWN, DRAWN | {"top_k": 50, "top_p": 0.95}, DRAWN | {"top_p": 0.9}, DRAWN | {"temperature": 0.0}]
    logits = logits_of(Case(fields, 5003, "bfloat16", 0.0, 1))
    assert not any(map(is_close, logits, fields))
    assert drawn(logits, fields, [9] * 4) == drawn_on_cpu(logits, fields, [9] * 4)


FILTERS = [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}, {"temperature": 0.0}]


@pytest.mark.parametrize("filters_of_row", FILTERS)
def test_no_number_counts_as_minus_infinity(filters_of_row: dict) -> None:
    """Which is drawn only where there is nothing else."""
    logits = torch.full((3, 150), math.nan)  # three blocks, which are reduced as four
    logits[0, 70], logits[1, 80], logits[1, 10:20], logits[2, 50:] = -1e30, 3e38, -math.inf, -math.inf
    assert drawn(logits, [DRAWN | filters_of_row] * 3, [4] * 3) == [70, 80, 0]


@pytest.mark.parametrize("filters_of_row", FILTERS)
def test_infinity_is_drawn_for_certain(filters_of_row: dict) -> None:
    logits = torch.zeros(1, 100)
    logits[0, [60, 90]] = math.inf
    fields = [DRAWN | filters_of_row]
    assert drawn(logits, fields, [4]) == drawn_on_cpu(logits, fields, [4]) == [60]


def test_of_equal_sums_the_cpu_and_the_gpu_take_the_same() -> None:
    """Scores so large that the noise is rounded to a multiple of 1 / 2, and sums of different scores are equal."""
    logits = 2**22 + 0.5 * torch.randint(0, 3, (20, 90), generator=torch.Generator().manual_seed(2)).float()
    fields = [DRAWN | {"seed": place, "top_k": 80 * (place % 2)} for place in range(20)]
    assert drawn(logits, fields, [4] * 20) == drawn_on_cpu(logits, fields, [4] * 20)


@pytest.mark.parametrize("temperature", [1.3, 0.7])
def test_scores_are_divided_as_on_the_cpu(temperature: float) -> None:
    """Neighbouring floats, some of which are equal once they are divided; noise is lost on scores of this size."""
    generator = torch.Generator().manual_seed(3)
    base = 2**29 + 64 * torch.randint(0, 2**22, (12, 1), generator=generator)
    logits = (base + 64 * torch.randint(0, 3, (12, 70), generator=generator)).float()
    fields = [DRAWN | {"temperature": temperature}] * 12
    assert drawn(logits, fields, [4] * 12) == drawn_on_cpu(logits, fields, [4] * 12)


@pytest.mark.parametrize("top_p, kept_of_equals", [(0.0, 1), (1e-9, 1), (0.24, 1), (0.26, 2), (0.51, 3), (0.99, 4)])
def test_top_p_counts_equals_by_rising_id(top_p: float, kept_of_equals: int) -> None:
    logits = torch.full((1, 100), -math.inf)
    logits[0, [3, 41, 70, 99]] = 2.0
    assert kept(logits, [DRAWN | {"top_p": top_p}], find_cuts) == [[3, 41, 70, 99][:kept_of_equals]]


@pytest.mark.parametrize("fields", [{}, {"min_p": 0.1, "temperature": 2.0}])
def test_tokens_come_as_often_as_they_should(fields: dict) -> None:
    """Chi-square over 100 draws; the bound is the 99.9 % point, and the seeds are fixed."""
    logits, fields = torch.randn(1, 8, generator=torch.Generator().manual_seed(1)) * 1.5, DRAWN | fields
    draws = drawn(logits.repeat(100, 1), [fields] * 100, list(range(100)))
    left = kept(logits, [fields], reference_find_cuts)[0]
    assert set(draws) <= set(left)
    expected = torch.softmax(logits[0, left].double() / fields["temperature"], 0) * len(draws)
    observed = torch.bincount(torch.tensor(draws), minlength=8)[left].double()
    degrees = len(left) - 1
    bound = degrees * (1 - 2 / (9 * degrees) + 3.09 * (2 / (9 * degrees)) ** 0.5) ** 3  # Wilson and Hilferty
    assert float(((observed - expected) ** 2 / expected).sum()) < bound


def test_top_k_keeps_just_so_many_and_of_equals_the_first() -> None:
    logits = torch.randint(0, 20, (1, 60), generator=torch.Generator().manual_seed(1)).float()
    order, sizes = logits[0].sort(descending=True, stable=True).indices.tolist(), range(2, 60, 2)
    left = kept(logits.expand(len(sizes), -1).contiguous(), [DRAWN | {"top_k": size} for size in sizes], find_cuts)
    assert left == [sorted(order[:size]) for size in sizes]


def test_min_p_keeps_all_equals_that_top_k_would_have_cut() -> None:
    logits = torch.zeros(1, 100)
    logits[0, [5, 50, 90]] = 2.0
    assert kept(logits, [DRAWN | {"top_k": 5, "min_p": 1.0}], find_cuts) == [[5, 50, 90]]


def test_nearly_all_of_the_mass_is_found_however_it_is_rounded() -> None:
    """The sum by which the cut is found may be less than the one that it is compared with."""
    logits = torch.randn(6, 150, generator=torch.Generator().manual_seed(1))
    for row, left in zip(logits, kept(logits, [DRAWN | {"top_p": 1 - 2**-24}] * 6, find_cuts), strict=True):
        assert set(row.topk(140).indices.tolist()) <= set(left)
