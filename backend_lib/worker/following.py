"""What a rank other than 0 has in place of a sampler and a publisher: rank 0 samples, and rank 0 speaks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from backend_lib.request import FinishReason
from backend_lib.worker.device import Put
from backend_lib.worker.process_groups import RankGroup
from backend_lib.worker.sampler import POISON, Sampled, Sampler
from backend_lib.worker.sampling import SamplingBatch, StartedRows
from backend_lib.worker.sequence import Sequence


class LeadingSampler(Sampler):
    """Rank 0's: the others are told what it has sampled, on the device."""

    def __init__(self, ranks: RankGroup, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._ranks = ranks

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        sampled = super().sample(logits, batch)
        self._ranks.broadcast(sampled.token_ids)
        return sampled


class FollowedBatch(NamedTuple):
    """int64 [L], the sequence's row of each token that rank 0 samples."""

    rows: torch.Tensor


class FollowingSampler:
    """Takes the tokens that rank 0 has sampled.

    Attributes:
        relay: as `Sampler.relay`.
    """

    def __init__(self, ranks: RankGroup, num_rows: int, device: torch.device) -> None:
        self.relay = torch.full((num_rows,), POISON, dtype=torch.int64, device=device)
        self._ranks = ranks

    def start(self, started: StartedRows, vocab_size: int) -> None:
        self.relay.index_fill_(0, started.rows, POISON)

    def capture(self, logits: torch.Tensor, largest: int) -> None: ...

    def batch(self, sequences: list[Sequence], positions: list[int], vocab_size: int, put: Put) -> FollowedBatch:
        return FollowedBatch(put(np.array([sequence.row for sequence in sequences], dtype=np.int64)))

    def sample(self, logits: torch.Tensor, batch: FollowedBatch) -> Sampled:
        token_ids = torch.empty_like(batch.rows)
        self._ranks.broadcast(token_ids)
        self.relay.index_copy_(0, batch.rows, token_ids)
        return Sampled(token_ids, None)


class SilentPublisher:
    """Has `backend_lib.worker.publisher.Publisher`'s methods and writes nothing: a slot's words are rank 0's."""

    def token(self, sequence: Sequence) -> None: ...

    def released(self, sequence: Sequence) -> None: ...

    def started(self, sequence: Sequence) -> None: ...

    def begun(self, slot: int) -> None: ...

    def failed(
        self, slot: int, generation: int, error: str = "", finish: FinishReason = FinishReason.ERROR
    ) -> None: ...

    def flush(self) -> None: ...
