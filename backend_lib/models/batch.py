"""What a decoder computes in one step: the tokens of several sequences, laid end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

# T tokens in the step · n of them decode rows · S sequences · L tokens whose logits are wanted · V vocabulary
# R rows (running sequences) · P positions of a sequence (max_model_len)

CHUNK_WORDS = 4  # of a chunk as kernels read it: first token, row, query_len, kv_len


@dataclass(frozen=True, kw_only=True)
class ForwardBatch:
    """T tokens of S sequences. The tokens of one sequence stand together and in order; single tokens come first.

    Attributes:
        input_ids: int64 [T].
        token_rows: int64 [T], each token's row of `kv_table`.
        positions: int64 [T], each token's place in its sequence.
        kv_index: int64 [T], where in the KV pool each token's key and value are written.
        kv_table: int32 [R + 1, P], row and position → index in the KV pool. Already holds this step's indices.
        num_decodes: n, the sequences at the beginning that have one token each; all of these are given logits.
        padding: how many of the n, the last ones, are there to fill up a graph.
        prompt_logits_index: int64 [L - n], which of the others are given logits; None: there are no others.
        chunks: int32 [S - n, 4], the sequences after those as kernels read them: first token, counted
            after the n, row, query_len and kv_len. On the device.
        rows, query_lens, kv_lens: int, one per sequence (S) without padding, in host memory: row, tokens in this step,
            and tokens it holds once this step's are written.
    """

    input_ids: torch.Tensor
    token_rows: torch.Tensor
    positions: torch.Tensor
    kv_index: torch.Tensor
    kv_table: torch.Tensor
    num_decodes: int
    prompt_logits_index: torch.Tensor | None
    chunks: torch.Tensor
    rows: list[int]
    query_lens: list[int]
    kv_lens: list[int]
    padding: int = 0

    def prompts(self) -> ForwardBatch:
        """Without the decode rows."""
        n = self.num_decodes
        return ForwardBatch(
            input_ids=self.input_ids[n:], token_rows=self.token_rows[n:], positions=self.positions[n:],
            kv_index=self.kv_index[n:], kv_table=self.kv_table, num_decodes=0,
            prompt_logits_index=self.prompt_logits_index, chunks=self.chunks,
            rows=self.rows[n - self.padding :], query_lens=self.query_lens[n - self.padding :],
            kv_lens=self.kv_lens[n - self.padding :],
        )  # fmt: skip

    @property
    def logits_index(self) -> torch.Tensor:
        """int64 [L], which of the T tokens are given logits."""
        if not self.num_decodes and self.prompt_logits_index is not None:
            return self.prompt_logits_index
        decodes = torch.arange(self.num_decodes, device=self.input_ids.device)
        if self.prompt_logits_index is None:
            return decodes
        return torch.cat([decodes, self.prompt_logits_index + self.num_decodes])


def chunk_words(rows: list[int], query_lens: list[int], kv_lens: list[int]) -> np.ndarray:
    """int32 [S, 4] for `ForwardBatch.chunks`, of sequences that stand one after another."""
    words = np.zeros((len(rows), CHUNK_WORDS), dtype=np.int32)
    words[1:, 0] = np.cumsum(query_lens[:-1])
    words[:, 1], words[:, 2], words[:, 3] = rows, query_lens, kv_lens
    return words


class Decoder(Protocol):
    """What the runner asks of a model."""

    vocab_size: int
    kv_bytes_per_token: int

    def allocate_kv(self, num_tokens: int) -> Any:
        """KV storage of `num_tokens` indices plus one spare, index `num_tokens`, for padding."""

    def forward(self, batch: ForwardBatch, kv: Any) -> torch.Tensor:
        """Write the step's keys and values into `kv` and return float32 logits [L, V], or [L, 0] on ranks but 0."""
