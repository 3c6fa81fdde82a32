"""The gguf package's reader, made safe for files that are cut or lie about their counts, lengths and places."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from gguf.gguf_reader import ReaderField

# What a file may claim, several times what is published. The package makes two or more Python objects of each item, so
# without a limit a length that runs into the tensors' bytes would take a hundred times the file in memory.
MAX_KEYS = MAX_TENSORS = 1 << 16
MAX_ARRAY_ITEMS = 1 << 21  # in all arrays together; of a vocabulary of 262,144 there are some 1.3 million
MAX_STRING_BYTES = 1 << 24
_MAX_DIMS = 4
_MAX_ELEMENTS_PER_BYTE = 8


def open_gguf(path: Path) -> GGUFReader:
    """Raises ValueError naming the file and what is wrong with it."""
    try:
        reader = BoundedReader(path)
        reader.check_layout()
    except (ValueError, IndexError, KeyError, OSError) as error:
        # A garbled file makes the package decode what is no number, type or text.
        raise ValueError(f"{path} is not a whole GGUF file: {error}") from None
    return reader


class BoundedReader(GGUFReader):
    """Reads nothing beyond the file's end. Over a plain array: slicing a memmap 100,000 times takes a second longer."""

    def __init__(self, path: Path) -> None:
        self._num_items = 0
        super().__init__(path)

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._data = mapped.view(np.ndarray)  # keeps the mapping alive as its base
        if self._data[:4].tobytes() != b"GGUF":
            raise ValueError("it does not begin with 'GGUF' (pickles such as .bin and .pt are not read)")

    def check_layout(self) -> None:
        """Each tensor lies behind the metadata and over no other: else a small file could claim to be a large model."""
        if self.byte_order != "I":
            raise ValueError("its numbers are big-endian")
        end = self.data_offset
        for tensor in sorted(self.tensors, key=lambda tensor: (tensor.data_offset, tensor.n_bytes)):
            if tensor.data_offset < end:
                raise ValueError(f"tensor '{tensor.name}' lies over what comes before it, at byte {tensor.data_offset}")
            end = tensor.data_offset + tensor.n_bytes

    # What the package calls while it reads.

    def _get(self, offset: int, dtype: Any, count: int = 1, *args: Any, **kwargs: Any) -> np.ndarray:
        # The package takes what is there; a garbled length would then keep it reading nothing for ever.
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self._data):
            raise ValueError(f"it ends too early: {count} items are wanted at byte {offset} of {len(self._data)}")
        return super()._get(offset, dtype, count, *args, **kwargs)

    def _get_str(self, offset: int) -> tuple[np.ndarray, np.ndarray]:
        length = self._get(offset, np.uint64)
        if length[0] > MAX_STRING_BYTES:
            self._refuse(f"a text of {length[0]} bytes at byte {offset}", MAX_STRING_BYTES)
        return length, self._get(offset + 8, np.uint8, length[0])

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        raw_item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item = GGUFValueType(raw_item[0])
        self._get(orig_offs + 12, np.uint8, length[0])  # an item has at least a byte
        self._num_items += int(length[0])
        if self._num_items > MAX_ARRAY_ITEMS:
            self._refuse(f"an array of {length[0]} items at byte {orig_offs}", f"{MAX_ARRAY_ITEMS} in all arrays")
        if item == GGUFValueType.ARRAY:
            raise ValueError(f"an array of arrays at byte {orig_offs} is not supported")
        if item == GGUFValueType.STRING:
            texts, end = self._texts(orig_offs + 12, int(length[0]))
            kinds = [GGUFValueType.ARRAY, item]
            return end - orig_offs, [raw_item, length, *texts], list(range(2, 2 + len(texts))), kinds
        # In one piece, where the package makes an array of each number.
        values = self._get(orig_offs + 12, self.gguf_scalar_to_np[item], length[0])
        return 12 + values.nbytes, [raw_item, length, values], [2], [GGUFValueType.ARRAY, item]

    def _texts(self, offset: int, count: int) -> tuple[list[np.ndarray], int]:
        """The bytes of each, and where they end. There are hundreds of thousands: no array is made of a length."""
        view, texts = self._data.data, []
        for _ in range(count):
            end = offset + 8 + int.from_bytes(view[offset : offset + 8], "little")
            if end > len(view) or end - offset > MAX_STRING_BYTES:
                raise ValueError(
                    f"it ends too early, or lies: a text at byte {offset} goes on to byte {end} of {len(view)}"
                )
            texts.append(self._data[offset + 8 : end])
            offset = end
        return texts, offset

    def _build_fields(self, offs: int, count: int) -> int:
        if count > MAX_KEYS:
            self._refuse(f"{count} keys", MAX_KEYS)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        if count > MAX_TENSORS:
            self._refuse(f"{count} tensors", MAX_TENSORS)
        return super()._build_tensor_info(offs, count)

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        field = super()._get_tensor_info_field(orig_offs)
        shape = field.parts[3].tolist()
        if not 0 < len(shape) <= _MAX_DIMS:
            self._refuse(f"tensor '{field.name}' has {len(shape)} dimensions", f"{_MAX_DIMS} and at least 1")
        if math.prod(shape) > _MAX_ELEMENTS_PER_BYTE * len(self._data):
            raise ValueError(f"it ends too early: tensor '{field.name}' has the shape {shape[::-1]}")
        return field

    def _refuse(self, what: str, allowed: object) -> None:
        raise ValueError(f"{what}; supported are at most {allowed}")
