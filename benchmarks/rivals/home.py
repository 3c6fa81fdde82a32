"""Where other engines, their models and their logs are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """One folder for each family of engines, each with an environment of its own, and one for the models."""

    path: Path

    def folder(self, family: str) -> Path:
        return self.path / family

    def venv(self, family: str) -> Path:
        return self.folder(family) / "venv"

    def python(self, family: str) -> Path:
        return self.venv(family) / "bin" / "python"

    def program(self, family: str, name: str) -> Path:
        return self.venv(family) / "bin" / name

    def stamp(self, family: str) -> Path:
        """There when the family was installed in full; holds the versions of its packages."""
        return self.folder(family) / "installed.txt"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def gguf(self, kind: str) -> Path:
        return self.path / "models" / f"{kind}.gguf"

    def known_rate(self) -> float:
        """The best fp32 GFLOP/s of all runs, by which one that is slow from beginning to end is seen; else 0."""
        return float(self._rate_file.read_text()) if self._rate_file.exists() else 0.0

    def keep_rate(self, rate: float) -> None:
        self._rate_file.parent.mkdir(parents=True, exist_ok=True)
        self._rate_file.write_text(f"{rate}\n")

    @property
    def _rate_file(self) -> Path:
        return self.path / "best_fp32_gflop_s.txt"

    @property
    def hf_folder(self) -> Path:
        return self.path / "models" / "hf"

    def converted(self, family: str, kind: str) -> Path:
        """The model in a family's own format."""
        return self.path / "models" / f"{family}-{kind}"

    @property
    def llama_cpp(self) -> Path:
        """The folder of llama.cpp's programs."""
        return self.folder("llama.cpp") / "build" / "bin"
