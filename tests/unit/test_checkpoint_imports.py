"""The router opens checkpoints inside Triton's stub, where neither torch nor a slow import may come with them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import make_config_folder, make_hash_checkpoint, make_tiny_gguf

_SCRIPT = """
import sys
from backend_lib.checkpoint import open_checkpoint
open_checkpoint(sys.argv[1])
heavy = {"torch", "transformers", "llm", "llama_cpp", "triton"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("kind", ["folder", "hash", "gguf", "smollm2"])
def test_opening_a_checkpoint_imports_no_torch(kind: str, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT, _model(kind, tmp_path)], check=True)


def _model(kind: str, path: Path) -> str:
    if kind == "folder":
        (make_config_folder(path) / "model.safetensors").write_bytes(b"")
    elif kind == "hash":
        make_hash_checkpoint(path)
    elif kind == "gguf":
        return str(make_tiny_gguf(path / "tiny.gguf"))
    return "smollm2" if kind == "smollm2" else str(path)
