"""Every setting of a Tandem model, read from `config.pbtxt` parameters and validated in one place."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

# Keys that Triton or its Python backend reads from the same `parameters` block; they are not ours to judge.
TRITON_KEYS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS"})
_DRIVER = Path("/dev/nvidiactl")

# Prompt tokens of a step that may be given log-probabilities: each of them takes a row of logits.
PROMPT_LOGPROBS_PER_STEP = 256

MAX_GROUPS = 64

# By setting: what `auto` is on a CPU and on a GPU.
_BY_DEVICE = {"max_running": (32, 256), "memory_fraction": (0.5, 0.9), "prefill_chunk": (256, 4096)}


def gpu_is_visible() -> bool:
    """Whether the NVIDIA driver shows this process a GPU. Whether torch can use it is the worker's to find out."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "none", "NoDevFiles")
    return _DRIVER.exists() and not hidden


def _choice(default: str, *others: str, help: str) -> Any:
    return field(default=default, metadata={"choices": (default, *others), "help": help})


def _number(default: float | None, low: float, high: float, *, help: str, kind: type = int) -> Any:
    """A number in [low, high]; a default of None is written `auto` and worked out when the model loads."""
    kind = float if isinstance(default, float) else kind
    return field(default=default, metadata={"kind": kind, "low": low, "high": high, "help": help})


def _text(default: str, *, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one model. Field metadata holds what is allowed, so that checks and docs have one source."""

    model: str = _text("smollm2", help="`smollm2` (built in), a Hugging Face folder, a hub id, or a GGUF file")
    device: str = _choice(
        "auto",
        "cpu",
        "cuda",
        "interpret",
        help="where the workers compute; `auto` is `cuda` where torch can use an NVIDIA GPU; `interpret` runs "
        "the GPU's kernels in Triton's interpreter, for tests",
    )
    contract: str = _choice(
        "vllm",
        "trtllm",
        help="whose tensors clients send: vllm_backend's, or tensorrtllm_backend's with a batch dimension",
    )
    dtype: str = _choice(
        "auto",
        "float32",
        "float16",
        "bfloat16",
        help="on a GPU, type of weights and KV cache: `auto` is bfloat16; on a CPU, of the KV cache alone: `auto` has "
        "2 bytes with int4 and int8 weights, else is float32",
    )
    weights: str = _choice(
        "auto",
        "int4",
        "int8",
        "fp16",
        "fp32",
        help="format of the weights on a CPU, see docs/weights.md; `auto` is int4 where that loses nothing, else int8",
    )
    overlap: str = _choice("auto", "on", "off", help="whether the loop prepares a step while the one before it runs")
    tensor_parallel: int = _number(1, 1, 64, help="workers that share one copy of the weights")
    data_parallel: int = _number(1, 1, MAX_GROUPS, help="copies of the weights, each with workers of its own")
    gpus: str = _text(
        "auto",
        help="GPUs of the workers, copy after copy, by their numbers among those that are visible, such as `0,1`; "
        "`auto` is the first ones",
    )
    agreement: str = _choice(
        "auto",
        "arena",
        "broadcast",
        help="how the first worker of a copy tells the others what to do in a step: through shared memory or by a "
        "collective; `auto` is `arena`",
    )
    max_running: int = _number(
        None, 1, 4096,
        help="sequences computed at the same time, per copy of the weights; `auto` is 32, on a GPU 256",
    )  # fmt: skip
    max_model_len: int | None = _number(
        None, 2, 1 << 24, help="prompt and output tokens of a sequence; `auto` is the checkpoint's context"
    )
    kv_tokens: int | None = _number(
        None,
        2,
        (1 << 31) - 1,
        help="tokens the KV cache holds; `auto` is 384 per running sequence and at least one context, if memory "
        "allows, and on a GPU all that memory allows",
    )
    memory_fraction: float = _number(
        None, 0.01, 0.95,
        help="share of the memory left after loading that the KV cache may take; `auto` is 0.5, on a GPU 0.9",
        kind=float,
    )  # fmt: skip
    admission: str = _choice(
        "past_future",
        "conservative",
        help="start a sequence when the estimated peak fits the KV cache, or only when all it may ever need does",
    )
    prefill_chunk: int = _number(
        None, 1, 1 << 20, help="prompt tokens computed in one step; `auto` is 256, on a GPU 4096"
    )
    queue_size: int = _number(256, 1, 1 << 16, help="requests that may wait; one more is refused with UNAVAILABLE")
    tool_parser: str = _choice(
        "auto",
        "none",
        "hermes",
        "llama3",
        "mistral",
        help="how the model writes calls of tools; `auto`: its template says",
    )
    reasoning_parser: str = _choice(
        "auto", "none", "think", help="whether the model reasons between `<think>` marks; `auto`: its template says"
    )
    default_max_tokens: int = _number(
        2048, 1, 1 << 24, help="output tokens when the request does not say, capped by the context"
    )
    stream_interval: int = _number(1, 1, 1 << 20, help="tokens per streamed response at least")
    drain_seconds: float = _number(
        8.0, 0.0, 3600.0, help="how long running requests may go on once the model is unloaded"
    )
    hang_seconds: float = _number(
        60.0, 6.0, 86400.0, help="a worker that makes no progress for so long, and for 20 full steps, is replaced"
    )
    threads: int | None = _number(None, 1, 1024, help="compute threads of a CPU worker; `auto` is the cores it may use")
    debug: str = _choice(
        "off", "on",
        help="check at every step that nothing waits for a GPU, and that all ranks have the same state, at some cost",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """What is `auto` by the kind of device is worked out here, for router and worker alike."""
        has_gpu = self.device == "cuda" or (self.device == "auto" and gpu_is_visible())
        for name, (on_cpu, on_gpu) in _BY_DEVICE.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, on_gpu if has_gpu else on_cpu)

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, str]) -> Settings:
        """Read `{key: string value}` as `config.pbtxt` gives it.

        Raises:
            ValueError: names the key, its value and what is allowed.
        """
        specs = {spec.name: spec for spec in fields(cls)}
        values = {}
        for key, text in parameters.items():
            if key in TRITON_KEYS:
                continue
            if key not in specs:
                raise ValueError(_unknown_key(key, list(specs)))
            values[key] = _parse(specs[key], text.strip())
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _unknown_key(key: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    return f"unknown parameter '{key}'{hint}; allowed are {', '.join(allowed)}"


def _parse(spec: Any, text: str) -> Any:
    """One setting's value from its text. Raises ValueError naming the setting, the value and what is allowed."""
    meta = spec.metadata
    if "kind" in meta and spec.default is None and text == "auto":
        return None
    value = _number_of(meta["kind"], text) if "kind" in meta else text
    if not _is_allowed(meta, value):
        verb = "are" if "choices" in meta else "is"
        raise ValueError(f"parameter '{spec.name}' is {reprlib.repr(text)}; allowed {verb} {_allowed(spec)}")
    return value


def _is_allowed(meta: Mapping[str, Any], value: Any) -> bool:
    if "choices" in meta:
        return value in meta["choices"]
    if "kind" in meta:
        return value is not None and meta["low"] <= value <= meta["high"]
    return bool(value)


def _number_of(kind: type, text: str) -> float | None:
    """The number, or None when the text is none. Python's other spellings, such as 1_000, are not numbers here."""
    try:
        return kind(text) if text.isascii() and "_" not in text else None
    except ValueError:
        return None


def _allowed(spec: Any) -> str:
    meta = spec.metadata
    if "choices" in meta:
        return ", ".join(meta["choices"])
    if "kind" not in meta:
        return "text"
    noun = "a whole number" if meta["kind"] is int else "a number"
    return f"{noun} from {meta['low']} to {meta['high']}" + (" or 'auto'" if spec.default is None else "")


def settings_table() -> str:
    """The settings as a Markdown table, for the README."""
    rows = ["| setting | default | allowed | meaning |", "| --- | --- | --- | --- |"]
    for spec in fields(Settings):
        default = "auto" if spec.default is None else spec.default
        rows.append(f"| `{spec.name}` | `{default}` | {_allowed(spec)} | {spec.metadata['help']} |")
    return "\n".join(rows)
