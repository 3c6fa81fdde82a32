"""What loading costs in memory, and what it says meanwhile."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import load_decoder, progress
from tests.support.checkpoints import make_tiny_llama
from tests.support.families import make_variant
from tests.support.gguf_families import convert

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
NUM_WEIGHTS = 8 * (3 * 512 * 1536 + 2 * 512 * 512 + 2 * 512 * 128) + 2 * 512 * 512

# The peak is the kernel's, set back just before the weights are read.
_SCRIPT = """
import re, sys
from pathlib import Path
import torch
from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import load_decoder
torch.set_num_threads(1)
torch.ops.quantized.linear_prepack_fp16(torch.zeros(8, 8), None)
checkpoint = open_checkpoint(sys.argv[1])
status = lambda key: 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
decoder = load_decoder(checkpoint, Settings(weights=sys.argv[2]))
print(status("VmHWM") - before)
"""


@pytest.mark.parametrize(("weights", "bytes_each"), [("fp32", 4), ("fp16", 2)])
def test_peak_memory_is_little_more_than_the_weights(weights: str, bytes_each: int, tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, shard_size="30MB", num_key_value_heads=2, **SIZES)
    run = subprocess.run([sys.executable, "-c", _SCRIPT, path, weights], check=True, capture_output=True, text=True)
    for shard in path.glob("*.safetensors"):  # a hundred megabytes, which pytest would keep for three runs
        shard.unlink()
    kept = NUM_WEIGHTS * bytes_each
    # Two mappings of at most 32 MB, and what one layer takes while it is packed.
    assert kept < int(run.stdout) < 1.2 * kept + (40 << 20)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_progress_is_logged(kind: str, tmp_path: Path, monkeypatch, caplog) -> None:
    path = make_variant(tmp_path / "model", "mixtral")
    if kind == "gguf":
        path = convert(path, tmp_path / "model.gguf")
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with caplog.at_level(logging.INFO, "tandem"):
        load_decoder(open_checkpoint(str(path)), Settings(weights="fp32"))
    shares = [int(record.getMessage().split()[1]) for record in caplog.records]
    assert shares == sorted(shares)
    assert len(shares) > 10
    assert 90 <= shares[-1] <= 100


def test_nothing_is_said_of_what_is_loaded_at_once(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.INFO, "tandem"):
        load_decoder(open_checkpoint(str(make_tiny_llama(tmp_path))), Settings())
    assert not caplog.records
