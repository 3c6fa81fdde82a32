"""Which prompts a group has been sent, and so which of their beginnings it may still have in its prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

BLOCK = 64  # tokens; a shorter common beginning is not worth a choice


def block_keys(token_ids: np.ndarray) -> list[int]:
    """A 64-bit key of each whole block of a prompt (int32 [N]), which stands for everything up to the block's end.

    Two beginnings with the same key would cost a worse choice and nothing else.
    """
    data, keys, key = token_ids.tobytes(), [], 0
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        key = hash((key, data[4 * (end - BLOCK) : 4 * end]))
        keys.append(key)
    return keys


class PrefixMap:
    """The blocks of one group, at most `max_blocks`, the least recently sent forgotten first.

    Not for several threads at once.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def matched(self, keys: Sequence[int]) -> int:
        """Leading blocks that are here."""
        for count, key in enumerate(keys):
            if key not in self._keys:
                return count
        return len(keys)

    def add(self, keys: Sequence[int]) -> None:
        """The last block first: of a prompt the end is forgotten before the beginning, without which it has no use."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.max_blocks:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()
