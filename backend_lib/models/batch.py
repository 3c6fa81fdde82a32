"""What a decoder computes in one step: the tokens of several sequences, laid end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

# T tokens in the step · S sequences · L sequences whose logits are wanted · V vocabulary
# R rows (running sequences) · P positions of a sequence (max_model_len)


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """T tokens of S sequences. The tokens of one sequence stand together and in order.

    Attributes:
        input_ids: int64 [T].
        positions: int64 [T], each token's place in its sequence.
        kv_index: int64 [T], where in the KV pool each token's key and value are written.
        kv_table: int32 [R + 1, P], row and position → index in the KV pool. Already holds this step's indices.
        rows: int, one per sequence (S), the sequence's row of `kv_table`.
        query_lens: int, one per sequence (S), its tokens in this step. They sum to T.
        kv_lens: int, one per sequence (S), tokens it holds once this step's are written. At least query_len.
        logits_index: int64 [L], which of the T tokens are given logits.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    kv_index: torch.Tensor
    kv_table: torch.Tensor
    rows: list[int]
    query_lens: list[int]
    kv_lens: list[int]
    logits_index: torch.Tensor


class Decoder(Protocol):
    """What the runner asks of a model."""

    vocab_size: int
    kv_bytes_per_token: int

    def allocate_kv(self, num_tokens: int) -> Any:
        """KV storage of `num_tokens` indices plus one spare, index `num_tokens`, for padding."""

    def forward(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        """Write the step's keys and values into `kv` and return float32 logits [L, V]."""
