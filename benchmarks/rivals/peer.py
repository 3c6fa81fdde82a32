"""What is compared: an engine with weights of one format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.rivals.home import Home
from benchmarks.rivals.sessions import Deadline, Session


class Weights(NamedTuple):
    """Bits for each weight as stored, scales and zero points included; None where it is not known."""

    label: str
    layer_bits: float | None
    head_bits: float | None


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The same for every engine of a run."""

    home: Home
    model: str
    threads: int
    max_running: int  # the most requests at a time
    sequence_tokens: int  # of the longest in a wave, prompt and output
    long_tokens: int  # of the prompt whose prefill is measured
    settings: Mapping[str, str] = field(default_factory=dict)  # Tandem's, for every Tandem of the run

    @property
    def kv_tokens(self) -> int:
        """Half as many again as a full wave needs, and enough for the long prompt."""
        return max(self.max_running * self.sequence_tokens * 3 // 2, self.long_tokens + 256)


Open = Callable[[Setup, Deadline], AbstractContextManager[Session]]


@dataclass(frozen=True, kw_only=True)
class Peer:
    name: str
    family: str  # what it is installed with; "" for Tandem
    how: str  # how it is asked
    weights: Weights
    open: Open
    open_long: Open | None = None  # for the long prompt, when that takes another start
    slow_start: bool = False  # started once for all repeats
    note: str = ""
