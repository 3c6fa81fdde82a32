"""A request as the router writes it into an arena, for benchmarks that play the router."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from backend_lib.arena import SlotTable

_ROOM = 64  # bytes for parameters, where there are hardly any


def request_bytes(prompt_len: int, max_tokens: int, *, room: int = _ROOM) -> int:
    """Of a slot's extent, in whole lines, `room` of them for parameters."""
    return room + -(-4 * (prompt_len + max_tokens) // 64) * 64


def write_request(
    slots: SlotTable, slot: int, generation: int, at: int, prompt: Sequence[int], max_tokens: int, *,
    params: dict[str, Any] | None = None, room: int = _ROOM, **fields: Any,
) -> None:  # fmt: skip
    """A greedy one that no token ends. `at`: where its extent begins; `fields`: of the slot's header."""
    blob = json.dumps({"stop_token_ids": []} | (params or {})).encode()
    assert len(blob) <= room
    slots.write(slot, {
        "generation": generation, "params_offset": at, "params_bytes": len(blob), "prompt_offset": at + room,
        "prompt_len": len(prompt), "output_offset": at + room + 4 * len(prompt), "max_tokens": max_tokens,
        "ignore_eos": 1, "top_p": 1.0, **fields,
    })  # fmt: skip
    slots.write_params(slot, blob)
    slots.prompt_ids(slot)[:] = prompt
