"""A machine with a GPU and no network may lack a package that no stage uses, and that modules import all the same."""

from __future__ import annotations

import importlib.util
import sys
from unittest import mock

# Reading GGUF files; compiling grammars.
UNUSED = {"gguf": ("gguf.gguf_reader",), "xgrammar": ()}


def stand_in_for_missing() -> None:
    for name, parts in UNUSED.items():
        if importlib.util.find_spec(name) is None:
            for each in (name, *parts):
                sys.modules[each] = mock.MagicMock(name=each)
