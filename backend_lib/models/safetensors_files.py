"""Tensors from safetensors files, by Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from backend_lib.checkpoint import DecoderConfig
from backend_lib.models.hf_names import decoder_name, hf_name
from backend_lib.models.progress import Progress
from backend_lib.models.shapes import check_shape, row_blocks

_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Left over from training, or worked out from the configuration.
_NOT_NEEDED = re.compile(r".*\.rotary_emb\.inv_freq")
# A file that is read through a mapping stays in memory, page by page, for as long as it is open.
_REOPEN_BYTES = 32 << 20


class SafetensorsFiles:
    """Shards, one open at a time."""

    def __init__(self, paths: Sequence[Path], config: DecoderConfig) -> None:
        self.architecture = config.architecture
        self.ignores_head = config.tie_word_embeddings  # some write it all the same
        self.places: dict[str, tuple[Path, str]] = {}  # which file, and its name there
        for path in paths:
            with _damage_named(path), safe_open(path, framework="pt") as shard:
                named = {decoder_name(name): (path, name) for name in list(shard.keys())}
            self.places |= {name: place for name, place in named.items() if name is not None}
        self.unread = set(self.places)
        self.progress = Progress(sum(path.stat().st_size for path in paths))
        self._open: tuple[Path, Any] | None = None
        self._bytes_through_it = 0

    def read_into(self, out: torch.Tensor, name: str, expert: int | None = None) -> None:
        name = hf_name(self.architecture, name, expert)
        if name not in self.places:
            raise ValueError(f"the checkpoint has no tensor '{name}'")
        path, name_there = self.places[name]
        with _damage_named(path):
            check_shape(name_there, self._shard(path).get_slice(name_there).get_shape(), out.shape)
            for rows in row_blocks(out.shape):
                out[rows].copy_(self._read_rows(path, name_there, rows))
        self.unread.discard(name)

    def _read_rows(self, path: Path, name: str, rows: slice) -> torch.Tensor:
        """A view of the mapped file."""
        tensor = self._shard(path).get_slice(name)[rows]
        if tensor.dtype not in _FLOAT_TYPES:
            raise ValueError(f"{path}: tensor '{name}' is {tensor.dtype}; supported are float32, float16 and bfloat16")
        self._bytes_through_it += tensor.nbytes
        self.progress.add(tensor.nbytes)
        return tensor

    def check_all_read(self) -> None:
        self._open = None
        unread = sorted(name for name in self.unread if not self._is_not_needed(name))
        if unread:
            raise ValueError(
                f"the checkpoint has a tensor '{unread[0]}' ({len(unread)} such), "
                f"which {self.architecture} with this configuration does not"
            )

    def _is_not_needed(self, name: str) -> bool:
        return bool(_NOT_NEEDED.fullmatch(name)) or (self.ignores_head and name == "lm_head.weight")

    def _shard(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path or self._bytes_through_it > _REOPEN_BYTES:
            self._open = path, safe_open(path, framework="pt")
            self._bytes_through_it = 0
        return self._open[1]


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
