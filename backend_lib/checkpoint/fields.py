"""Typed reading of a mapping that a file gave us, with errors that name the file and the key."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backend_lib.checkpoint.untrusted import is_there, read_text, shown

MAX_JSON_BYTES = 1 << 26
MAX_WHOLE = (1 << 31) - 1
# Beyond these float32 has no room for what is computed of a number.
_SMALLEST, _LARGEST = 1e-30, 1e30


@contextmanager
def source_named(source: str) -> Iterator[None]:
    """Put `source` before the text of a ValueError that does not mention it."""
    try:
        yield
    except ValueError as error:
        if source in str(error):
            raise
        raise ValueError(f"{source}: {error}") from None


class Fields:
    """A mapping and where it came from. A value of None counts as absent.

    Every reader raises ValueError naming the source and the key when the value is absent without a default, or is not
    what was asked for.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    @classmethod
    def from_json(cls, path: Path) -> Fields:
        """Raises FileNotFoundError when there is no such file, ValueError when it does not hold a JSON object."""
        try:
            values = json.loads(read_text(path, MAX_JSON_BYTES))
        except RecursionError:
            raise ValueError(f"{path} is nested too deeply") from None
        except ValueError as error:
            if str(path) in str(error):
                raise
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} does not hold a JSON object")
        return cls(values, str(path))

    @classmethod
    def from_json_if_there(cls, path: Path) -> Fields:
        """An empty mapping when there is no such file."""
        return cls.from_json(path) if is_there(path) else cls({}, str(path))

    def error(self, key: str, allowed: str) -> ValueError:
        value = self.values.get(key)
        if value is None:
            return ValueError(f"{self.source}: '{key}' is missing")
        return ValueError(f"{self.source}: '{key}' is {shown(value)}; supported is {allowed}")

    def whole(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_WHOLE) -> int:
        """A whole number from `low` to `high`."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(key, f"a whole number of at least {low}")
        if value > high:
            raise self.error(key, f"a whole number of at most {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero that float32 can hold."""
        value = self._get(key, default)
        if not _is_number(value) or not _SMALLEST <= value <= _LARGEST:
            raise self.error(key, f"a number above 0, from {_SMALLEST} to {_LARGEST}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number; None when absent."""
        value = self._get(key, None)
        if value is not None and not _is_finite(value):
            raise self.error(key, "a number")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings."""
        values = self._get(key, None)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.error(key, "a list of strings")
        return values

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        values = self._get(key, None)
        if not isinstance(values, list) or not all(_is_finite(value) for value in values):
            raise self.error(key, "a list of numbers")
        return tuple(float(value) for value in values)

    def whole_list(self, key: str) -> list[int] | None:
        """A list of whole numbers of at least 0; None when absent."""
        values = self._get(key, None)
        if values is None:
            return None
        if not isinstance(values, list) or not all(_is_whole(value) for value in values):
            raise self.error(key, "a list of whole numbers")
        return values

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id, a list of them, or none: `eos_token_id` is written in all three ways."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_whole(i) for i in ids):
            raise self.error(key, "a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))

    def nested(self, key: str) -> Fields:
        """An object inside this one; empty when absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Fields(value, f"{self.source}: {key}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and -sys.float_info.max <= value <= sys.float_info.max


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
