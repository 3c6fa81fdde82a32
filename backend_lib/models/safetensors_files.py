"""Tensors from safetensors files, by Hugging Face's names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from backend_lib.checkpoint import DecoderConfig
from backend_lib.checkpoint.fields import source_named
from backend_lib.checkpoint.untrusted import parser_errors
from backend_lib.models.hf_names import decoder_name, hf_name
from backend_lib.models.progress import Progress
from backend_lib.models.shapes import Part, check_shape

_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
# Left over from training, or worked out from the configuration.
_NOT_NEEDED = re.compile(r".*\.rotary_emb\.inv_freq")
# A file that is read through a mapping stays in memory, page by page, for as long as it is open.
_REOPEN_BYTES = 32 << 20


class _Place(NamedTuple):
    """Where a tensor lies: the file, and its name and shape there."""

    path: Path
    name: str
    shape: tuple[int, ...]


class SafetensorsFiles:
    """Shards, one open at a time. `readers`: how many read a share of them each, this one included."""

    def __init__(self, paths: Sequence[Path], config: DecoderConfig, readers: int = 1) -> None:
        self.architecture = config.architecture
        self.ignores_head = config.tie_word_embeddings  # some write it all the same
        self.places: dict[str, _Place] = {}
        for path in paths:
            with _damage_named(path), safe_open(path, framework="pt") as shard:
                places = [_Place(path, name, tuple(shard.get_slice(name).get_shape())) for name in list(shard.keys())]
            named = {decoder_name(place.name): place for place in places}
            self.places |= {name: place for name, place in named.items() if name is not None}
        self.unread = set(self.places)
        self.progress = Progress(sum(path.stat().st_size for path in paths) // readers)
        self._open: tuple[Path, Any] | None = None
        self._bytes_through_it = 0

    def check(self, name: str, shape: Sequence[int], expert: int | None = None) -> None:
        name = hf_name(self.architecture, name, expert)
        if name not in self.places:
            raise ValueError(f"the checkpoint has no tensor '{name}'")
        place = self.places[name]
        with source_named(str(place.path)):
            check_shape(place.name, place.shape, shape)

    def read_into(self, out: torch.Tensor, name: str, expert: int | None = None, part: Part | None = None) -> None:
        part = part or Part.whole(out.shape)
        self.check(name, part.shape, expert)
        name = hf_name(self.architecture, name, expert)
        place = self.places[name]
        for block, rows in part.row_blocks():
            out[block].copy_(self._read_block(place.path, place.name, rows, part.columns))
        self.unread.discard(name)

    def _read_block(self, path: Path, name: str, rows: slice, columns: range | None) -> torch.Tensor:
        """A view of the mapped file, or a copy of some columns."""
        index = rows if columns is None else (rows, slice(columns.start, columns.stop))
        with _damage_named(path):
            tensor = self._shard(path).get_slice(name)[index]
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


def _damage_named(path: Path) -> AbstractContextManager[None]:
    return parser_errors(f"{path} is not a whole safetensors file")
