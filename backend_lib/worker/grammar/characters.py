"""Sets of characters, as sorted ranges of code points without gaps between neighbours."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

Ranges = tuple[tuple[int, int], ...]  # both ends included

_LAST = 0x10FFFF
# Half a surrogate pair is no character.
ALL: Ranges = ((0, 0xD7FF), (0xE000, _LAST))
BEYOND_ASCII: Ranges = ((0x80, 0xD7FF), (0xE000, _LAST))
DIGITS: Ranges = ((0x30, 0x39),)
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))


def union(*parts: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(each for part in parts for each in part):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(high, joined[-1][1])
        else:
            joined.append((low, high))
    return tuple(joined)


def without(ranges: Ranges, gone: Ranges) -> Ranges:
    """What of `ranges` is not in `gone`."""
    for first, last in gone:
        pieces = [((low, min(high, first - 1)), (max(low, last + 1), high)) for low, high in ranges]
        ranges = tuple(piece for pair in pieces for piece in pair if piece[0] <= piece[1])
    return ranges


def among(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def of(codes: Iterable[int]) -> Ranges:
    return union([(code, code) for code in codes])


@cache
def spaces() -> Ranges:
    """What Python's \\s matches."""
    return of(code for code in range(0x3001) if chr(code).isspace())


@cache
def decimals() -> Ranges:
    """What Python's \\d matches: digits of every script."""
    return of(code for code in range(0x20000) if chr(code).isdecimal())
