"""A decoder whose decode rows are one replayed graph. Prompts are launched after it, kernel by kernel.

Sums over ranks are part of the graph, so all ranks replay graphs of the same sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from backend_lib.models.batch import ForwardBatch
from backend_lib.models.decoder import TransformerDecoder
from backend_lib.models.graphs import Graphs, graph_sizes

# T tokens in the step · n decode rows, padding included · L tokens whose logits are wanted · V vocabulary


class StepInputs(NamedTuple):
    """Where a graph finds a step's inputs, int64 [capacity] each: decode rows, padding, then the tokens of prompts."""

    input_ids: torch.Tensor
    token_rows: torch.Tensor
    positions: torch.Tensor
    kv_index: torch.Tensor

    def part(self, start: int, stop: int) -> StepInputs:
        return StepInputs(*(each[start:stop] for each in self))


class GraphedDecoder:
    """A `Decoder` (see `backend_lib.models.batch`) whose batches lie in `inputs`. Logits are valid until the next step.

    Args:
        max_decodes: most decode rows of a step.
        max_prompt: most prompt tokens of a step.
        max_logits: most tokens of a step whose logits are wanted.
    """

    def __init__(self, decoder: TransformerDecoder, *, max_decodes: int, max_prompt: int, max_logits: int) -> None:
        self.config = decoder.config
        self.device = decoder.device
        self.vocab_size = decoder.vocab_size
        self.kv_bytes_per_token = decoder.kv_bytes_per_token
        self._decoder = decoder
        self._max_decodes = max_decodes
        self._graphs = Graphs(decoder.device)
        self.inputs = StepInputs(
            *(torch.zeros(max_decodes + max_prompt, dtype=torch.int64, device=decoder.device) for _ in range(4))
        )
        width = 0 if decoder.ranks.rank else decoder.vocab_size
        self.logits = torch.zeros((max_logits, width), device=decoder.device)

    def allocate_kv(self, num_tokens: int) -> list[torch.Tensor]:
        return self._decoder.allocate_kv(num_tokens)

    @torch.inference_mode()
    def capture(self, kv: list[torch.Tensor], kv_table: torch.Tensor) -> None:
        """Make the graphs; `kv` and `kv_table` stay where they are. The inputs must hold what can be computed."""
        self._graphs.capture(graph_sizes(self._max_decodes), lambda size: self._decode(size, kv, kv_table))

    def padded(self, num_decodes: int) -> int:
        """How many decode rows a step is filled up to."""
        return self._graphs.size_for(num_decodes) if num_decodes else 0

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: list[torch.Tensor]) -> torch.Tensor:
        """Write the step's keys and values into `kv` and return float32 logits [L, V], or [L, 0] on ranks but 0."""
        n = batch.num_decodes
        if n and self._graphs.has(n):
            self._graphs.replay(n)
        elif n:
            self._decode(n, kv, batch.kv_table)
        wanted = n - batch.padding  # what stands behind them in the logits is padding's, and makes room
        if len(batch.input_ids) > n:
            of_prompts = self._decoder.forward(batch.prompts(), kv)
            self.logits[wanted : wanted + len(of_prompts)].copy_(of_prompts)
            wanted += len(of_prompts)
        return self.logits[:wanted]

    def _decode(self, size: int, kv: list[torch.Tensor], kv_table: torch.Tensor) -> None:
        inputs = self.inputs.part(0, size)
        batch = ForwardBatch(
            **inputs._asdict(), kv_table=kv_table, num_decodes=size, prompt_logits_index=None,
            chunks=kv_table[:0, :4], rows=[], query_lens=[], kv_lens=[],
        )  # fmt: skip
        self.logits[:size].copy_(self._decoder.forward(batch, kv))
