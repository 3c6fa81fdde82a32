"""The kernels in the instructions of a CPU with AVX2 alone: all tests of theirs hold, and results are the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.cpu_instructions import HASWELL, results
from tests.support.kernels import same_bits

HERE = Path(__file__).parent
TESTS = [HERE / f"test_cpu_{name}.py" for name in ("pack", "matmul", "rows", "heads", "attention")]


def results_with_avx2(out: Path, tests: list[Path]) -> dict[str, np.ndarray]:
    command = [sys.executable, "-m", "tests.support.cpu_instructions", str(out), *map(str, tests)]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=os.environ | HASWELL, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with np.load(out) as file:
        return dict(file)


@pytest.fixture(scope="module")
def with_avx2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    return results_with_avx2(tmp_path_factory.mktemp("avx2") / "results.npz", TESTS)


def test_all_tests_hold(with_avx2: dict[str, np.ndarray]) -> None:
    assert not with_avx2["has_vnni"]


def test_results_are_the_same_to_the_last_bit(with_avx2: dict[str, np.ndarray]) -> None:
    ours = results()
    assert ours.keys() == with_avx2.keys()
    ours.pop("has_vnni")
    assert len(ours) > 40
    differ = {name: float(np.abs(each - with_avx2[name]).max()) for name, each in ours.items()
              if not same_bits(each, with_avx2[name])}  # fmt: skip
    assert not differ
