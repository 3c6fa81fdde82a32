"""What the stages share: the GPU, where checkpoints lie, and what has been measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from backend_lib.checkpoint import open_checkpoint
from backend_lib.config import Settings
from backend_lib.worker.machine import Machine, build_machine
from benchmarks.device.gpu import Gpu
from benchmarks.device.shapes import LLAMA_8B, SMALL, TINY, Shape, write_checkpoint


@dataclass
class Bench:
    """`results`: by stage, what has come of it so far."""

    gpu: Gpu
    folder: Path
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def is_dry(self) -> bool:
        return not self.gpu.is_real

    @cached_property
    def shape(self) -> Shape:
        """That of which speed is measured."""
        return TINY if self.is_dry else LLAMA_8B

    @cached_property
    def large(self) -> Path:
        return write_checkpoint(self.folder / "large", self.shape, self.gpu.dtype, self.gpu.device)

    @cached_property
    def small(self) -> Path:
        shape = TINY if self.is_dry else SMALL
        return write_checkpoint(self.folder / "small", shape, self.gpu.dtype, self.gpu.device, seed=1)

    @property
    def bandwidth(self) -> float:
        return self.results["environment"]["bandwidth_tb"] * 1e12

    @property
    def product_rate(self) -> float:
        return self.results["environment"]["product_tflops"] * 1e12

    def settings(self, model: Path, **settings: Any) -> Settings:
        dtype = "float32" if self.is_dry else "bfloat16"
        return Settings(model=str(model), device=self.gpu.setting, dtype=dtype, **settings)

    def machine(self, model: Path, max_model_len: int, *, kv_tokens: int | None = None, **settings: Any) -> Machine:
        chosen = self.settings(model, max_model_len=max_model_len, **settings)
        return build_machine(open_checkpoint(str(model)), chosen, max_model_len, kv_tokens=kv_tokens)
