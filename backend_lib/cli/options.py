"""What the user asked for on the command line, checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from backend_lib.cli.flags import ServerFlags
from backend_lib.cli.process import ServePlan
from backend_lib.cli.repository import SHIPPED_MODEL, read_parameters, shipped_repository
from backend_lib.cli.server import find_server
from backend_lib.config import Settings

if TYPE_CHECKING:
    from backend_lib.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that `serve` and `doctor` share. `assignments` are the `key=value` texts of --set."""

    model: str | None = None
    assignments: Sequence[str] = ()
    name: str | None = None
    tritonserver: Path | None = None
    model_repository: Path | None = None
    flags: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """The repository that is served."""
        return self.model_repository or shipped_repository()

    @property
    def source_model(self) -> str:
        """The folder that settings are written for. In a repository of the user's own, --name says which it is."""
        return self.name if self.model_repository and self.name else SHIPPED_MODEL

    def settings(self) -> dict[str, str]:
        """The settings to write into config.pbtxt.

        Raises:
            ValueError: names the setting, its value and what is allowed.
        """
        values = dict(_split(text) for text in self.assignments)
        if self.model is not None:
            values["model"] = self.model
        if "model" in values:
            values["model"] = _absolute(values["model"])
        Settings.from_parameters(values)
        return values

    def effective_settings(self) -> Settings:
        """The settings as the router will read them: config.pbtxt with the user's written in."""
        config = (self.source / self.source_model / "config.pbtxt").read_text()
        return Settings.from_parameters(read_parameters(config) | self.settings())

    def open_model(self) -> Checkpoint:
        """The checkpoint the router will open, so that what is wrong with it is said here and not in Triton's log.

        Raises:
            FileNotFoundError: there is no such model.
            ValueError: it can't be read, or its context is too short for the settings.
        """
        # Imported here, because it takes tokenizers and gguf, and doctor is most needed where they are missing.
        from backend_lib.checkpoint import open_checkpoint

        settings = self.effective_settings()
        checkpoint = open_checkpoint(settings.model)
        longest, context = settings.max_model_len, checkpoint.context_length
        if longest is not None and longest > context:
            raise ValueError(f"parameter 'max_model_len' is {longest}; the context of {checkpoint.name} is {context}")
        return checkpoint

    def plan(self) -> ServePlan:
        """Raises ValueError or FileNotFoundError that says what is wrong or missing."""
        if self.name is not None and not re.fullmatch(r"\w[\w.-]{,127}", self.name, re.ASCII):
            allowed = "letters, digits and . _ -, the first one no . or -, at most 128"
            raise ValueError(f"--name {self.name}: expected {allowed}, because it names a folder")
        settings = self.settings()
        server = find_server(self.tritonserver)
        if problem := server.stub_problem():
            raise ValueError(problem)
        return ServePlan(
            server=server,
            source=self.source,
            source_model=self.source_model,
            model=self.name or SHIPPED_MODEL,
            settings=settings,
            flags=ServerFlags(self.flags),
        )


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text}: expected key=value")
    return key.strip(), value


def _absolute(model: str) -> str:
    """A path as the router can use it from another folder; a hub id stays as it is."""
    if not model.strip():
        raise ValueError(
            "parameter 'model' is empty; expected smollm2, a Hugging Face folder, a hub id, or a GGUF file"
        )
    try:
        path = Path(model).expanduser()
        return str(path.resolve()) if path.exists() else model
    except (OSError, RuntimeError) as error:
        # A name too long, a folder that may not be read, a home folder that nobody has.
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"model '{_shortened(model)}': {reason}") from None


def _shortened(text: str, limit: int = 100) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
