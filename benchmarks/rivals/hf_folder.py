"""A Hugging Face folder of the built-in model, for engines that read no GGUF: its tensors dequantised to float32."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, empty

from backend_lib.checkpoint import Checkpoint, DecoderConfig, open_checkpoint
from backend_lib.models.gguf_tensors import GgufTensors
from backend_lib.models.hf_names import hf_name


def write_folder(model: str, folder: Path) -> None:
    """`model`: `smollm2` or a GGUF file of the Llama architecture."""
    checkpoint = open_checkpoint(model)
    assert isinstance(checkpoint.config, DecoderConfig) and checkpoint.config.architecture == "LlamaForCausalLM"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(checkpoint, checkpoint.config), folder / "model.safetensors", {"format": "pt"})
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(checkpoint))
    _write(folder / "config.json", _config(checkpoint, checkpoint.config))
    _write(folder / "generation_config.json", {"eos_token_id": list(checkpoint.eos_token_ids)})


def _tensors(checkpoint: Checkpoint, config: DecoderConfig) -> dict[str, Tensor]:
    assert checkpoint.weights.gguf is not None
    source = GgufTensors(checkpoint.weights.gguf, config)
    tensors = {}
    for name in sorted(source.unread):
        values = empty(source.tensors[name].shape[::-1].tolist())
        source.read_into(values, name)
        tensors[hf_name(config.architecture, name, None)] = values
    return tensors


def _config(checkpoint: Checkpoint, config: DecoderConfig) -> dict[str, Any]:
    rope = config.layers[0].rope
    assert rope is not None
    return {
        "architectures": [config.architecture], "model_type": "llama", "torch_dtype": "float32", "hidden_act": "silu",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps, "rope_theta": rope.theta,
        "max_position_embeddings": config.max_position, "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": False, "mlp_bias": False, "bos_token_id": _token_id(checkpoint, checkpoint.bos_token),
        "eos_token_id": checkpoint.eos_token_ids[0],
    }  # fmt: skip


def _tokenizer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20,
        "bos_token": checkpoint.bos_token, "eos_token": checkpoint.eos_token, "pad_token": checkpoint.eos_token,
        "unk_token": checkpoint.eos_token, "chat_template": checkpoint.chat_template,
    }  # fmt: skip


def _token_id(checkpoint: Checkpoint, token: str) -> int | None:
    return checkpoint.tokenizer.token_to_id(token)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    write_folder(sys.argv[1], Path(sys.argv[2]))
