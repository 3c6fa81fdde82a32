"""What a request field is."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from backend_lib.router.kinds import NULL, TRUTH, Kind, read_number

MAX_LIST = 64


@dataclass(frozen=True, kw_only=True)
class Field:
    """One request field.

    Attributes:
        name: what the client calls it, and vllm_backend most often.
        aliases: what else it is called; those of tensorrtllm_backend first.
        kind: of its values.
        low, high: bounds of a number, of each number of an object, or of each string's length.
        above: `low` itself is not allowed.
        count: members of a list or of an object at most. None: as many as the vocabulary has.
        noun: the dataclass it is an attribute of. None: the contract interprets it, or it is not supported and only
            the value that leaves it off passes.
        attribute: its name there.
        off: the number that clients of tensorrtllm_backend send for none.
        help: what it means.
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: Kind
    low: float = 0
    high: float = 1
    above: bool = False
    count: int | None = MAX_LIST
    noun: type | None = None
    attribute: str = ""
    off: float | None = None
    help: str = ""

    @property
    def is_list(self) -> bool:
        return self.kind.is_list

    @property
    def is_supported(self) -> bool:
        return self.low != self.high

    @property
    def default(self) -> Any:
        """The noun's default: values that were not given are not passed to it."""
        specs = dataclasses.fields(self.noun) if self.noun else ()
        return next((spec.default for spec in specs if spec.name == self.attribute), None)

    def most(self, vocab_size: int) -> int:
        """Members at most."""
        return vocab_size if self.count is None else self.count

    def parse(self, raw: Any, vocab_size: int) -> Any:
        """The client's value as ours. Raises ValueError when it is not what `allowed` says."""
        value = self.kind.read(raw)
        if isinstance(value, tuple) and len(value) > self.most(vocab_size):
            raise ValueError("too many")
        for number in self.kind.measures(value):
            if not self.low <= number <= self.high or (self.above and number == self.low):
                raise ValueError("out of range")
        if not all(0 <= token_id < vocab_size for token_id in self.kind.token_ids(value)):
            raise ValueError("no token")
        return value

    def is_off(self, raw: Any) -> bool:
        """Whether the client's value is `off`, alone or as the only one of a list."""
        raw = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
        try:
            return self.off is not None and read_number(raw) == self.off
        except ValueError:
            return False

    def allowed(self, vocab_size: int) -> str:
        """What an error tells the client to send."""
        if not self.is_supported:
            return f"only {self._neutral()} is supported"
        return f"allowed is {self.words(str(vocab_size - 1), str(self.most(vocab_size)))}"

    def _neutral(self) -> str:
        if self.kind is NULL:
            return "null"
        if self.kind is TRUTH:
            return "true" if self.low else "false"
        return "an empty list" if self.is_list else _written(self.low)

    def words(self, last: str, count: str) -> str:
        """What is allowed, given the words for the vocabulary's last id and for how many there may be."""
        first, high = _written(self.low), _written(self.high)
        span = f"above {first} up to {high}" if self.above else f"from {first} to {high}"
        return self.kind.words.format(span=span, count=count, last=last, most=high)


def _written(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)
