"""What Hugging Face's families call the tensors that GGUF has one name for."""

from __future__ import annotations

import re

_COMMON = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
# With a norm on both sides, the name that others give to the one before the MLP is that of the one after attention.
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OWN: dict[str, dict[str, str]] = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "MixtralForCausalLM": {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    },
    "Phi3ForCausalLM": {"ffn_up": "mlp.gate_up_proj"},
}
# Models that see as well keep the decoder under a name of its own, and not always the same.
_TEXT_PART = re.compile(r"(model\.)?language_model\.(model\.)?")
_OTHER_PARTS = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)")


def hf_name(architecture: str, name: str, expert: int | None) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    names = _COMMON | _OWN.get(architecture, {})
    stem, kind = name.rsplit(".", 1)
    if layer := _LAYER_NAME.fullmatch(stem):
        return f"model.layers.{layer[1]}.{names[layer[2]].format(expert=expert)}.{kind}"
    return f"{names[stem]}.{kind}"


def decoder_name(name: str) -> str | None:
    """A tensor's name in a file as it would be in a model of text alone; None for what is not the decoder's."""
    if _OTHER_PARTS.fullmatch(name):
        return None
    part = _TEXT_PART.match(name)
    if part is None:
        return name
    rest = name[part.end() :]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"
