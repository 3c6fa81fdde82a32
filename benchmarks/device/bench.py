"""What stages share: the sizes, the device, the machine's rates, and the large model, made when first asked for."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.device.gpu import Cpu, Gpu
from benchmarks.device.report import Report
from benchmarks.device.scale import Scale

_RESERVE = 6 << 30  # bytes of logits, activations and graphs beside weights and KV cache


class Bench:
    def __init__(self, scale: Scale, gpu: Gpu | Cpu, report: Report) -> None:
        self.scale = scale
        self.gpu = gpu
        self.report = report
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-device-"))
        self._engine: Any = None
        self._steps: Any = None

    def rate(self, name: str) -> float:
        """Bytes a second, or operations a second, that the environment stage measured."""
        items = self.report.stage("environment")["items"]
        value = items.get(name)
        if not isinstance(value, dict) or "per_second" not in value:
            from benchmarks.device import environment

            value = items[name] = environment.RATES[name](self)
        return value["per_second"]

    def engine(self) -> Any:
        if self._engine is None:
            from benchmarks.device.folder import write_folder
            from benchmarks.device.model import Engine, random_weights, settings_for

            scale = self.scale
            folder = write_folder(self.folder / "large", scale.large)
            longest = max(*scale.prompts, *scale.contexts, 8 * sum(scale.lengths)) + 4 * scale.idle_steps
            settings = settings_for(scale, self.gpu, folder, kv_tokens=self._kv_tokens())
            # Its memory for copies is written outside of inference mode, in which some stages run.
            with random_weights(), torch.inference_mode(False):
                self._engine = Engine(settings, longest + 1, num_slots=scale.requests + 2 * scale.max_running)
        return self._engine

    def steps(self) -> Any:
        if self._steps is None:
            from benchmarks.device.model import Steps

            self._steps = Steps(self.engine())
        return self._steps

    def drop_engine(self) -> None:
        """Give its memory back."""
        self._engine = self._steps = None
        gc.unfreeze()  # what the engine froze would never be collected
        gc.collect()
        self.gpu.free_bytes()

    def _kv_tokens(self) -> int:
        config = self.scale.large
        layers, hidden, inner = (
            config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
        )  # fmt: skip
        key_value = config["num_key_value_heads"] * config["head_dim"]
        weights = 2 * (layers * (2 * hidden + 2 * key_value + 3 * inner) * hidden + 2 * config["vocab_size"] * hidden)
        room = int(0.95 * self.gpu.free_bytes()) - weights - (_RESERVE if self.gpu.device.type == "cuda" else 0)
        return min(self.scale.kv_tokens, room // (layers * 2 * key_value * 2))
