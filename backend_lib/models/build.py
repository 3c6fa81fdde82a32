"""A decoder put together from its configuration and tensors."""

from __future__ import annotations

import torch

from backend_lib.checkpoint import DecoderConfig
from backend_lib.models.decoder import Attention, GatedMLP, Layer, RMSNorm, TransformerDecoder
from backend_lib.models.linear import Linear, make_linear
from backend_lib.models.rope import Rope
from backend_lib.models.weights import TensorSource


class DecoderBuilder:
    """Reads tensors in the order of the layers, fuses what shares an input, and keeps them in the format asked for."""

    def __init__(self, config: DecoderConfig, tensors: TensorSource, weights: str) -> None:
        self.config = config
        self.tensors = tensors
        self.weights = weights

    def decoder(self, max_position: int) -> TransformerDecoder:
        """Raises ValueError naming a tensor that is missing or of the wrong shape."""
        config = self.config
        embedding, head = self._embedding_and_head()
        return TransformerDecoder(
            config,
            embedding=embedding,
            layers=[self._layer(f"model.layers.{i}") for i in range(config.num_layers)],
            norm=self._norm("model.norm"),
            head=head,
            rope=Rope(config, max_position),
        )

    def _embedding_and_head(self) -> tuple[torch.Tensor, Linear]:
        """The two largest tensors, together, so that the float32 original is gone before the layers are read."""
        vocab_size, hidden_size = self.config.vocab_size, self.config.hidden_size
        embedding = self.tensors.read("model.embed_tokens.weight", (vocab_size, hidden_size))
        if self.config.tie_word_embeddings:
            head = make_linear(embedding, None, self.weights)
        else:
            head = self._linear(["lm_head"], [vocab_size], hidden_size, bias=False)
        return (embedding if self.weights == "fp32" else embedding.half()), head

    def _layer(self, name: str) -> Layer:
        return Layer(
            attention_norm=self._norm(f"{name}.input_layernorm"),
            attention=self._attention(f"{name}.self_attn"),
            mlp_norm=self._norm(f"{name}.post_attention_layernorm"),
            mlp=self._mlp(f"{name}.mlp"),
        )

    def _attention(self, name: str) -> Attention:
        config = self.config
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return Attention(
            qkv=self._linear(
                [f"{name}.{each}_proj" for each in "qkv"],
                [query, key_value, key_value],
                config.hidden_size,
                bias=config.qkv_bias,
            ),
            output=self._linear([f"{name}.o_proj"], [config.hidden_size], query, bias=config.attention_output_bias),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )

    def _mlp(self, name: str) -> GatedMLP:
        inner, hidden, bias = self.config.intermediate_size, self.config.hidden_size, self.config.mlp_bias
        return GatedMLP(
            gate_up=self._linear([f"{name}.gate_proj", f"{name}.up_proj"], [inner, inner], hidden, bias=bias),
            down=self._linear([f"{name}.down_proj"], [hidden], inner, bias=bias),
        )

    def _norm(self, name: str) -> RMSNorm:
        weight = self.tensors.read(f"{name}.weight", (self.config.hidden_size,))
        return RMSNorm(weight=weight, eps=self.config.rms_norm_eps)

    def _linear(self, names: list[str], out_sizes: list[int], in_size: int, *, bias: bool) -> Linear:
        """One layer that computes all of `names`, their outputs side by side."""
        sized = list(zip(names, out_sizes, strict=True))
        weight = torch.cat([self.tensors.read(f"{name}.weight", (size, in_size)) for name, size in sized])
        biases = torch.cat([self.tensors.read(f"{name}.bias", (size,)) for name, size in sized]) if bias else None
        return make_linear(weight, biases, self.weights)
