"""Small random checkpoints of every family, written by transformers, in sizes that hide no mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tests.support.checkpoints import LLAMA3_ROPE, TINY_VOCAB, make_config_folder

WINDOW = 9  # shorter than the prompts
_YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0],
}
# transformers counts the factors by hidden / heads, whatever head_dim says. Sequences fit the original length.
_PHI4 = {
    "hidden_size": 120,
    "rope_parameters": _LONGROPE | {"partial_rotary_factor": 0.7},
    "original_max_position_embeddings": 128,
    "max_position_embeddings": 128,
}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
}


class Variant(NamedTuple):
    """A family's name in transformers (`Qwen2` of `Qwen2ForCausalLM`) and fields of its configuration."""

    family: str
    fields: dict[str, Any]


VARIANTS: dict[str, Variant] = {
    "llama": Variant("Llama", {}),
    "llama, llama3 rope, tied": Variant("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama, linear rope": Variant(
        "Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
    ),
    "llama, dynamic rope": Variant(
        "Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 500.0}}
    ),
    "llama, biases": Variant("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Variant("Mistral", {"sliding_window": None}),
    "mistral, window": Variant("Mistral", {"sliding_window": WINDOW}),
    "qwen2, tied": Variant("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": Variant("Qwen2", {"rope_parameters": _YARN, "max_position_embeddings": 256}),
    "qwen2, window": Variant("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2}),
    "qwen3": Variant("Qwen3", {}),
    "qwen3, yarn, tied": Variant(
        "Qwen3", {"rope_parameters": _YARN, "max_position_embeddings": 256, "tie_word_embeddings": True}
    ),
    "qwen3, biases": Variant("Qwen3", {"attention_bias": True}),
    "smollm3": Variant("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3, window, untied": Variant(
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 1, 0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "tie_word_embeddings": False,
        },
    ),
    "gemma2": Variant(
        "Gemma2",
        {
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
    ),
    "gemma3": Variant(
        "Gemma3",
        {
            "num_hidden_layers": 7,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "rope_parameters": _GEMMA3_ROPE,
        },
    ),
    "phi3": Variant("Phi3", {"sliding_window": WINDOW}),
    "phi4-mini, short": Variant("Phi3", _PHI4),
    "phi4-mini, long": Variant(
        "Phi3",
        _PHI4 | {"original_max_position_embeddings": 8, "max_position_embeddings": 512, "tie_word_embeddings": True},
    ),
    "mixtral": Variant("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3 moe": Variant(
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "norm_topk_prob": True},
    ),
    "qwen3 moe, some layers dense": Variant(
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 28,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
        },
    ),
}


def make_variant(
    path: Path, variant: str, *, seed: int = 0, shard_size: str = "1GB", dtype: str = "float32", **overrides: Any
) -> Path:
    """A folder with a random model of one of VARIANTS. `overrides` are fields of its configuration."""
    make_config_folder(path)  # its config.json is written over
    torch.manual_seed(seed)
    model = build_model(variant, **overrides)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shard_size)
    return path


def build_model(variant: str, **overrides: Any) -> transformers.PreTrainedModel:
    family, fields = VARIANTS[variant]
    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**(_SIZES | fields | overrides))
    config._attn_implementation = "eager"  # the others leave the soft cap out
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    randomise(model, norm_mean=0.0 if family.startswith("Gemma") else 1.0)
    return model


def make_gemma3_with_vision(path: Path) -> Path:
    """As Gemma 3 is published from 4B on. The vision tower is there and never used."""
    make_config_folder(path)
    torch.manual_seed(0)
    text = transformers.Gemma3TextConfig(**(_SIZES | VARIANTS["gemma3"].fields))
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config)
    randomise(model, norm_mean=0.0)
    model.save_pretrained(path)
    return path


# head_dim is not hidden / heads, three query heads share a key-value head, and nothing is a power of two.
_SIZES = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


@torch.no_grad()
def randomise(model: torch.nn.Module, norm_mean: float) -> None:
    """Nothing stays at the value where leaving it out makes no difference."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.normal_(norm_mean, 0.3)
        elif name.endswith(("bias", "mlp.gate.weight")):  # the latter are routers
            parameter.normal_(0.0, 0.5)
