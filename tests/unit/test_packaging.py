"""The distribution: its names beside other people's, and what an installed wheel brings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.serve import tandem_serve

ROOT = Path(__file__).resolve().parents[2]

_TINY_LLAMA = """
import kernels, torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available

assert not is_kernels_available()
torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64)
config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(config).eval()
assert model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape == (1, 7)
print(kernels.__file__)
"""


def run_python(code: str, python: str | Path = sys.executable, cwd: Path = ROOT) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([str(python), "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_our_kernels_and_transformers_live_in_one_environment():
    # transformers uses a package called `kernels` when its version fits; ours has the name but not the version.
    assert Path(run_python(_TINY_LLAMA)) == ROOT / "kernels" / "__init__.py"


def test_the_cli_loads_neither_torch_nor_numpy():
    loaded = "import sys, backend_lib.cli.main; print([each for each in ('torch', 'numpy') if each in sys.modules])"
    assert run_python(loaded) == "[]"


@pytest.mark.long
def test_an_installed_wheel_serves_its_own_model_repository(tmp_path):
    """Built, installed without its dependencies in an environment that sees ours, and used away from the checkout."""
    python = make_environment(tmp_path / "venv")
    pip = [python, "-m", "pip", "install", "--no-deps", "--quiet", str(copy_sources(tmp_path / "sources"))]
    subprocess.run(pip, check=True, timeout=300)
    find = "from backend_lib.cli.repository import shipped_repository; print(shipped_repository())"
    shipped = Path(run_python(find, python, tmp_path))
    assert shipped == tmp_path / "venv/share/tandem/model_repository"
    with tandem_serve(tmp_path, command=[str(python.parent / "tandem"), "serve"]) as served:
        assert served.post_example().splitlines()[-2].startswith('data: {"model_name":"llm"')
        environments = {each.environ()["PATH"].partition(":")[0] for each in served.family}
        assert environments == {str(python.parent)}


def copy_sources(folder: Path) -> Path:
    """What a wheel is built from. A copy, because building leaves folders that a later wheel would pick up."""
    folder.mkdir()
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in ("backend_lib", "kernels", "model_repository"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def make_environment(folder: Path) -> Path:
    """A virtual environment that also finds the packages of the one that runs the tests. Returns its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    own = run_python("import sysconfig; print(sysconfig.get_path('purelib'))", python)
    # A path alone, without the other environment's .pth files: those of an editable install would bring the checkout.
    (Path(own) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python
