"""A step's inputs where graphs find them: for a GPU."""

from __future__ import annotations

import torch

from backend_lib.models.batch import ForwardBatch
from backend_lib.models.graphed import GraphedDecoder
from backend_lib.worker.inputs import StagedBatch, described
from kernels.relay import stage_inputs


class StaticInputs:
    """An `InputStage` (see `backend_lib.worker.inputs`). One launch writes ids, rows, positions and indices, fills up
    the decode rows with the spare row, and writes the KV table."""

    def __init__(self, decoder: GraphedDecoder) -> None:
        self._decoder = decoder

    def padded(self, num_decodes: int) -> int:
        return self._decoder.padded(num_decodes)

    def stage(
        self, staged: StagedBatch, relay: torch.Tensor, kv_table: torch.Tensor, spare_row: int, spare_index: int
    ) -> ForwardBatch:
        prompt_ids = staged.prompt_ids if len(staged.prompt_ids) else relay[:0]  # on the device
        inputs = self._decoder.inputs.part(0, staged.padded + len(prompt_ids))
        stage_inputs(
            staged.token_rows, staged.positions, staged.kv_index, prompt_ids, relay, kv_table, *inputs,
            num_decodes=staged.num_decodes, padded=staged.padded, spare_row=spare_row, spare_index=spare_index,
        )  # fmt: skip
        return ForwardBatch(**inputs._asdict(), **described(staged, kv_table))
