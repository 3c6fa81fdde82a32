"""Finding the stub process of a model's previous instance, among processes that have a stub's arguments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(60)"
ASK = "import sys; from backend_lib.router.predecessor import *; sys.exit(has_predecessor(*sys.argv[1:]))"


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Like a stub it has the model's file as its first argument and the instance's name as a later one."""
    model = tmp_path / "llm/3/model.py"
    model.parent.mkdir(parents=True)
    model.write_text(SLEEP)
    with subprocess.Popen([sys.executable, str(model), "region", "llm_0_0", "DEFAULT"]) as process:
        yield process
        process.kill()


def ask(instance: str, version: str) -> bool:
    """In a younger process with the same parent."""
    return bool(subprocess.run([sys.executable, "-c", ASK, instance, version], cwd=ROOT, timeout=30).returncode)


def test_the_same_instance_of_the_same_version_is_found_while_it_lives(stub):
    assert ask("llm_0_0", "3")
    stub.kill()  # not reaped yet
    deadline = 100
    while ask("llm_0_0", "3"):
        deadline -= 1
        assert deadline


@pytest.mark.parametrize(("instance", "version"), [("llm_0_1", "3"), ("llm_0_0", "2"), ("other", "3")])
def test_others_are_not_waited_for(stub, instance, version):
    assert not ask(instance, version)
