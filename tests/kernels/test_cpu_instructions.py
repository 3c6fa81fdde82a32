"""The kernels in the instructions of older CPUs: all tests of theirs hold, and results are the same bits."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.cpu_instructions import CPUS, environment, is_here, results
from tests.support.kernels import same_bits

HERE = Path(__file__).parent
TESTS = [HERE / f"test_cpu_{name}.py" for name in ("pack", "matmul", "rows", "heads", "attention")]
HALVES = ("uint16", "float16")  # a pool of 2 bytes is of another type where the CPU multiplies bfloat16


def results_of(cpu: str, out: Path) -> dict[str, np.ndarray]:
    command = [sys.executable, "-m", "tests.support.cpu_instructions", str(out), *map(str, TESTS)]
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=os.environ | environment(cpu), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    with np.load(out) as file:
        return dict(file)


@pytest.mark.parametrize(
    "cpu", ["haswell", *(pytest.param(cpu, marks=pytest.mark.long) for cpu in ("skylake-avx512", "icelake-server"))]
)
def test_another_cpu(cpu: str, tmp_path: Path) -> None:
    if not is_here(cpu):
        pytest.skip("this CPU lacks the instructions")
    theirs, ours = results_of(cpu, tmp_path / "results.npz"), results()
    assert set(theirs.pop("features")) == set(CPUS[cpu].split())
    ours.pop("features")
    alone = {name for name in ours.keys() ^ theirs.keys() if not name.endswith(HALVES)}
    assert not alone
    both = ours.keys() & theirs.keys()
    assert len(both) > 40
    differ = {
        name: float(np.abs(ours[name] - theirs[name]).max()) for name in both if not same_bits(ours[name], theirs[name])
    }
    assert not differ
