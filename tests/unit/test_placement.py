"""Which device, type and format the settings come to, and what is said of those that cannot be had."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backend_lib.checkpoint import Checkpoint, open_checkpoint
from backend_lib.config import Settings
from backend_lib.models import placement
from backend_lib.models.placement import place
from tests.support.checkpoints import make_hash_checkpoint, make_tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Checkpoint:
    return open_checkpoint(str(make_tiny_llama(tmp_path_factory.mktemp("llama"))))


@pytest.fixture
def with_gpu(monkeypatch) -> None:
    monkeypatch.setattr(placement, "_trouble_with_cuda", lambda: "")


def refused(llama: Checkpoint, **settings) -> str:
    with pytest.raises(ValueError) as caught:
        place(Settings(**settings), llama)
    return str(caught.value)


def test_a_gpu_is_taken_where_there_is_one(llama, with_gpu):
    assert place(Settings(), llama)[:3] == (torch.device("cuda"), "dense", torch.bfloat16)
    for name, dtype in (("float16", torch.float16), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        assert place(Settings(device="cuda", dtype=name), llama).dtype is dtype
    assert place(Settings(device="cpu"), llama).device.type == "cpu"


@pytest.mark.parametrize("is_visible", [False, True])
def test_the_cpu_is_taken_where_there_is_none(llama, monkeypatch, caplog, is_visible):
    monkeypatch.setattr(placement, "_trouble_with_cuda", lambda: "it is somewhere else")
    monkeypatch.setattr(placement, "gpu_is_visible", lambda: is_visible)
    assert place(Settings(), llama) == place(Settings(device="cpu"), llama)
    said = ["computing on the CPU, though there is a GPU: it is somewhere else"] if is_visible else []
    assert [record.getMessage() for record in caplog.records] == said
    assert refused(llama, device="cuda") == "parameter 'device' is 'cuda', but it is somewhere else"


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA here")
def test_a_build_without_cuda_is_said_to_be_one(llama):
    assert refused(llama, device="cuda").endswith(f"torch {torch.__version__} is built without CUDA")


def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    assert placement._trouble_with_cuda() == "Tesla V100 has compute capability 7.0; 8.0 is needed"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert placement._trouble_with_cuda() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no NVIDIA GPU that its CUDA 13.0 can use" in placement._trouble_with_cuda()


def test_what_a_device_does_not_do_is_refused(llama, with_gpu):
    assert refused(llama, device="cpu", dtype="bfloat16") == (
        "parameter 'dtype' is 'bfloat16'; allowed on a CPU are auto, float32"
    )
    assert "parameter 'weights' is 'int8'; allowed on a GPU" in refused(llama, device="cuda", weights="int8")
    assert "parameter 'dtype' is 'bfloat16'; allowed on Triton's interpreter are auto, float32, float16" in refused(
        llama, device="interpret", dtype="bfloat16"
    )


def test_the_hash_model_stays_on_the_cpu(with_gpu, tmp_path: Path):
    checkpoint = open_checkpoint(str(make_hash_checkpoint(tmp_path, vocab_size=64, eos_token_id=2, max_position=64)))
    assert place(Settings(), checkpoint).device.type == "cpu"


def test_a_cpu_worker_does_not_import_triton():
    """It takes 70 MiB."""
    code = "import sys, backend_lib.worker.engine; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
