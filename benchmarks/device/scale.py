"""How large everything is: as in serving on a GPU, or as small as Triton's interpreter can bear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Attributes:
    large: config.json of the model that is timed; small: of the one whose tokens are compared.
    copied, square: bytes that are copied, and the side of the matrices, for the machine's rates.
    batches, contexts: of decoding; `main`: the pairs that are timed again after tuning, which is for decoding at the
        pairs of `tuned`.
    lengths: mean tokens in and out of a served request.
    """

    dtype: torch.dtype
    kernel_dtypes: tuple[torch.dtype, ...]
    large: dict[str, Any]
    small: dict[str, Any]
    copied: int
    square: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    main: tuple[tuple[int, int], ...]
    tuned: tuple[tuple[int, int], ...]
    prompts: tuple[int, ...]
    peer_batches: tuple[int, ...]
    peer_contexts: tuple[int, ...]
    max_running: int
    prefill_chunk: int
    kv_tokens: int
    requests: int
    lengths: tuple[int, int]
    idle_batch: int
    idle_steps: int
    compared: tuple[int, int]  # prompts, and tokens of each
    rows: int  # of tokens or logits in the kernels' checks

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def llama(**sizes: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu", **sizes,
    }  # fmt: skip


LLAMA_8B = llama(
    vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=131072,
)  # fmt: skip

REAL = Scale(
    dtype=torch.bfloat16, kernel_dtypes=(torch.bfloat16, torch.float16), large=LLAMA_8B,
    # Its heads are the large one's, so that attention is compiled once.
    small=llama(
        vocab_size=24000, hidden_size=1024, intermediate_size=1408, num_hidden_layers=3, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
    ),
    copied=4 << 30, square=8192, batches=(1, 16, 64, 256), contexts=(128, 2048, 8192),
    main=((1, 128), (1, 8192), (16, 2048), (64, 2048)), tuned=((1, 8192), (64, 2048)), prompts=(8192, 32768),
    peer_batches=(1, 16), peer_contexts=(128, 2048), max_running=256, prefill_chunk=4096, kv_tokens=64 * 8192 + 4096,
    requests=1000, lengths=(220, 200), idle_batch=64, idle_steps=200, compared=(12, 64), rows=64,
)  # fmt: skip

TINY = llama(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
)  # fmt: skip

DRY = Scale(
    dtype=torch.float16, kernel_dtypes=(torch.float16,), large=TINY, small=TINY, copied=1 << 16, square=32,
    batches=(1, 2), contexts=(8,), main=((2, 8),), tuned=((2, 8),), prompts=(12,),
    peer_batches=(1,), peer_contexts=(8,),
    max_running=2, prefill_chunk=8, kv_tokens=96, requests=3, lengths=(4, 3), idle_batch=2, idle_steps=2,
    compared=(2, 3), rows=3,
)  # fmt: skip
