"""Reading files that nobody vouches for: what is not a regular file, too large, or breaks a parser is a ValueError."""

from __future__ import annotations

import reprlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SHOWN = 500  # characters of a foreign message
_repr = reprlib.Repr()
_repr.maxlevel = 4
_repr.maxlist = _repr.maxdict = _repr.maxtuple = 20
_repr.maxstring = _repr.maxother = _repr.maxlong = 200


def shown(value: Any) -> str:
    """A value from a file as an error may quote it: short, however large or deep it is."""
    return _repr.repr(value)


def is_there(path: Path) -> bool:
    """Whether there is such a file. Raises ValueError or OSError naming what is there but no regular file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise ValueError(f"{path} is a link to nothing") from None
        return False
    except ValueError:  # NUL, or half a character
        raise ValueError(f"{str(path)!r} cannot be the name of a file") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file")
    return True


def check_size(path: Path, max_bytes: int) -> None:
    """Raises ValueError naming a file that is larger; a sparse one claims terabytes at no cost."""
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path} has {size} bytes; supported are at most {max_bytes}")


def read_text(path: Path, max_bytes: int) -> str:
    """Raises ValueError naming a file that is larger or not UTF-8, FileNotFoundError when there is none."""
    check_size(path, max_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


@contextmanager
def parser_errors(words: str) -> Iterator[None]:
    """Around a call of a Rust library: whatever it raises becomes a ValueError that begins with `words`.

    These libraries raise bare `Exception`, and a panic of theirs is not even that.
    """
    try:
        yield
    except MemoryError:  # says nothing of the file
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{words}: {str(error)[:_SHOWN]}") from None
