"""What a request demands of its logits beyond temperature and filters, as the slot's parameter blob has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class LogitRules:
    """Attributes are named as the request's fields.

    Attributes:
        bias_ids, bias: int64 [B] and float32 [B], what is added to which logits.
        bad_words: token ids of each, the last of which must not follow the others.
        allowed: int64 [A], the only tokens; None is all.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias_ids: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    bias: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed: np.ndarray | None = None

    @classmethod
    def from_blob(cls, blob: Mapping[str, Any]) -> LogitRules | None:
        """None when the request demands nothing of the kind."""
        penalties = {name: blob[name] for name in _PENALTIES if name in blob}
        bias, bad_words, allowed = (blob.get(name, ()) for name in ("logit_bias", "bad_words", "allowed_token_ids"))
        if not (penalties or bias or bad_words or allowed):
            return None
        return cls(
            **penalties,
            bias_ids=np.array([token for token, _ in bias], dtype=np.int64),
            bias=np.array([value for _, value in bias], dtype=np.float32),
            bad_words=tuple(map(tuple, bad_words)),
            allowed=np.array(allowed, dtype=np.int64) if allowed else None,
        )

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def banned_after(self, output_ids: Sequence[int]) -> Iterator[int]:
        """Tokens that would complete a bad word. As in vLLM, only the output's own tokens begin one."""
        for *start, last in self.bad_words:
            if len(start) <= len(output_ids) and list(output_ids[len(output_ids) - len(start) :]) == start:
                yield last


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
